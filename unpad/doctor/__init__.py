"""`unpad doctor`: why a recipe or a run does not learn, or is slow.

`examine.py` runs the checks, a file per group of them; `catalogue.py` says in English and Chinese what each finds.
"""

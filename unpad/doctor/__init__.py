"""`unpad doctor`: why a recipe or a run does not learn, or is slow.

`examine.py` runs the checks, a file per group of them in `data/`, `recipe/` and `trials/`, and those that a family
names (`images.py`); each check says in English and Chinese what it finds.
"""

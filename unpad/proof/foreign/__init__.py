"""The certificate for models, collators and trainers of others: is a sequence in their batch the sequence alone?

Nothing here needs a model of ours, and nothing imports transformers or TRL: their objects are recognised by what they
can do.
"""

"""The certificate for external models, collators and trainers: does a sequence in their batch equal the sequence alone?

Nothing here needs a model of this package or imports transformers or TRL: their objects are recognised by their
interfaces.
"""

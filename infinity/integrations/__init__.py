"""Other frameworks around models of this package: Accelerate, Lightning, Trainers of transformers and TRL."""

"""Other frameworks' loops around models of this package: Accelerate, and Trainers of transformers and TRL."""

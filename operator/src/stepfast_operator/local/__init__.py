"""`stepfast run`: one TrainingJob on this machine."""

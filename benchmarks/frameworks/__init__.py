"""What a save costs the training: Stepfast's way beside each framework's default and asynchronous one, in one run."""

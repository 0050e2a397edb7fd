"""How a model is trained by several ranks, seen by one of them in a world that is not there."""

"""Pages for browsers that need nothing else: what they share. Knows of no page in particular."""

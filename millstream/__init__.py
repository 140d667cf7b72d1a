"""Everything on one machine, and the user's verbs."""

"""The demonstration model: corpus, training recipe, export, evaluation, and the checkpoint."""

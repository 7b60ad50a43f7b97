"""The Kimi-K3 text model for inference: config, checkpoint and layers; experts run elsewhere."""

"""`k3 synth`: checkpoints of any size in the exact layout of the NVFP4 release, from a seed."""

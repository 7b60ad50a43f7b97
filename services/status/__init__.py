"""`k3 status`: what a pod is doing, for people and for programs."""

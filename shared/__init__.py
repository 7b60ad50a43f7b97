"""What both ends of the pod must agree on: pure core, I/O adapters, kernels."""

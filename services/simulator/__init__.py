"""`k3 simulate`: what a pod would give before it is built, and which figure decides it."""

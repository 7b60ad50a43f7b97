"""`k3 chat`: talk to a pod from a terminal."""

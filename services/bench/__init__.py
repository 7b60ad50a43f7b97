"""`k3 bench`: figures that can be taken again, each with the machine it was taken on."""

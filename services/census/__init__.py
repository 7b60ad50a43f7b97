"""`k3 census`: what a checkpoint holds, to the byte, from its headers."""

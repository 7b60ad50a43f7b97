"""`k3 keys`: identities of Stations and nodes, and who is admitted."""

"""Ray: the cluster of a run and the actors that host its ranks. The only importer of ray; importing this loads none."""

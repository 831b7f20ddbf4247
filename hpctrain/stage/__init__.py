"""Copies of environments and data files on the nodes' own storage, made once per job (``hpctrain stage``)."""

"""Carry bytes between ranks: who, not in what order (that is ``collectives``)."""

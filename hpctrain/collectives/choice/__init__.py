"""Selection of algorithms: measurements, the tables made from them, and the preparation of a call."""

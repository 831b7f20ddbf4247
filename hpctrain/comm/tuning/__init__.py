"""Selection of algorithms: measurements, and the tables made from them."""

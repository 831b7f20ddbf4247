"""Which algorithm carries an operation out: tables, the measurements they come from, and the way that is taken."""

"""Let every worker train a replica of its own, which one centre holds together."""

"""Command line of hpctrain: one module per verb, imported only when the verb is called."""

"""Turn command lines into calls: one file a verb, imported only when it is called."""

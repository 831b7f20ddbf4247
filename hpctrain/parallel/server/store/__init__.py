"""Hold served parameters, and make updates of them where they lie."""

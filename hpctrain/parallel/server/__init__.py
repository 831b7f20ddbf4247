"""Let every worker make updates of its own: parameter server, Hogwild, elastic averaging."""

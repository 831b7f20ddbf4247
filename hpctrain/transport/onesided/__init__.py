"""Let ranks read and change each other's memory while its owners compute."""

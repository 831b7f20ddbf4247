"""Reports of runs for people who did not watch them: one HTML page, or the files of experiment trackers."""

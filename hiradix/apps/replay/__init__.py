"""Floor 7: the replay lab. Plays traces through the real tree and cache over simulated pools, and reports."""

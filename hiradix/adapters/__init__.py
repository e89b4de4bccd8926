"""Floor 6: the cache inside engines that are not ours; each is imported only there."""

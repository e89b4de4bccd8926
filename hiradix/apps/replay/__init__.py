"""The replay lab: plays traces through the real tree and cache over simulated pools, and reports."""

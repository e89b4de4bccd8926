"""Carries wishes out, over either planner; `table.Intents` has them all."""

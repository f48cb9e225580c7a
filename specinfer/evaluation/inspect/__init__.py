"""The target's view of a result's steps, and the outcome that other trees would have had."""

"""What the target says of a result's steps, and what other trees would have given."""

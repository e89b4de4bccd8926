"""APIs that clients speak, a file each: a body becomes an `Asked`, answers become what the client expects."""

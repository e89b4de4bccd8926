"""APIs that clients speak, a file each: a body becomes an `ApiRequest`, answers become what the client expects."""

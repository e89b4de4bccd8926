"""APIs that clients speak, a file each: a body becomes an `ApiRequest`, and answers what the client expects."""

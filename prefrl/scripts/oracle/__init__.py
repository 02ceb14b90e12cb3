"""`prefrl verify`: what a loss, an advantage or a KL estimate does on average, by exact enumeration."""

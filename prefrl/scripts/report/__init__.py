"""`prefrl report`, `watch` and `look`: what the folder of a run says about it."""

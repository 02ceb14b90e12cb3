"""The options of every algorithm as data: schema.json, its writer, what is read from it before torch is imported."""

"""SGLang's storage: its file format, and its storage classes hosted here."""

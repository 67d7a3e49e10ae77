"""Who may ask for which name: documents, patterns, the matcher and the policy."""

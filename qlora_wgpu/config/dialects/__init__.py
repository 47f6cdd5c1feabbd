"""Other trainers' files: which one wrote a file, and what it means here."""

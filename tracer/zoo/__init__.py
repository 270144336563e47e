"""Small models of many families, trained on an invented world whose facts are known exactly."""

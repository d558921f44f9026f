"""One line about each data set and model, for a list that needs no torch."""

from __future__ import annotations

DATASETS = {
    "breast_cancer": "569 tumours in 30 columns, 2 classes",
    "diabetes": "442 patients in 10 columns; the illness after a year, a number",
    "digits": "1,797 handwritten digits of 8 by 8 pixels, 10 classes",
    "fashion_mnist": "70,000 pictures of clothes, 28 by 28 pixels, 10 classes; its four files must be there",
    "python_chars": "the next character in the source of Python's standard library",
    "python_functions": "functions of Python's standard library; which of 8 groups of modules one is from",
    "wine": "178 wines in 13 columns, 3 classes",
}

MODELS = {
    "linear": "linear regression",
    "logistic": "logistic regression; of texts, over the mean of their tokens",
    "mlp": "a network of dense layers, for tables and images",
    "cnn": "a small convolutional network, for images",
    "gru": "a recurrent network, for texts",
    "transformer": "a small transformer, for texts",
    "char_lm": "a small transformer that predicts the next character",
}

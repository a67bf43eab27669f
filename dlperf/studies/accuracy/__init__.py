"""The accuracy study: steps, layers and single operators, predicted and measured."""

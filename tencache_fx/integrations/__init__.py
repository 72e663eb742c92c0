"""What other libraries need to run tencache; each module imports the library it is for, and none is imported here."""

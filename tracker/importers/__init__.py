"""Import of expert loads from files of other systems. Pure: bytes in, arrays out."""

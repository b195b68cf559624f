"""The words the order desk is made of: names, places and products, all invented for it."""

from __future__ import annotations

# Even and odd positions never meet in one customer (see database._customers): the two request sets share no name.
FIRST_NAMES = (
    *("Ada", "Bruno", "Carla", "Dario", "Edith", "Felix", "Greta", "Hugo", "Irena", "Jonas"),
    *("Katja", "Leon", "Mira", "Nils", "Olga", "Pavel", "Quinn", "Rosa", "Stefan", "Tilda"),
    *("Ulrich", "Vera", "Walter", "Xenia", "Yannick", "Zelda", "Anton", "Bella", "Conrad", "Dora"),
    *("Emil", "Flora", "Gideon", "Hanna", "Igor", "Judith", "Karl", "Lydia", "Martin", "Nadia"),
)
LAST_NAMES = (
    *("Abbott", "Berger", "Castle", "Dunn", "Ellery", "Fischer", "Grant", "Holm", "Iversen", "Jansen"),
    *("Keller", "Lindqvist", "Marsh", "Novak", "Orlov", "Parker", "Quist", "Rowan", "Sommer", "Tanner"),
    *("Ulmer", "Vance", "Weber", "Yates", "Zeller", "Archer", "Baxter", "Conway", "Dalton", "Everett"),
    *("Forbes", "Gallo", "Harper", "Ingram", "Joyner", "Kemp", "Lowell", "Mercer", "Nolan", "Osborn"),
)
STREETS = (
    *("Mill Lane", "Oak Street", "Harbour Road", "Station Street", "Elm Avenue", "Church Hill", "Park Row"),
    *("Bridge Street", "Garden Walk", "Market Square", "Cedar Close", "Quarry Road", "Lake View", "North Gate"),
)
CITIES = (
    *("Norwick", "Eastbrook", "Halden", "Millford", "Stonebury", "Kingsport", "Rivermouth", "Ashby"),
    *("Greenvale", "Westhaven", "Larkfield", "Redhill", "Dunmore", "Fairview", "Oxley", "Brightwater"),
)
CARRIERS = ("Swift Parcel", "BlueLine", "Northern Post")
PAYMENT_METHODS = ("credit card", "gift card", "bank transfer")

# product, price in cents, the three options it comes in
PRODUCTS: tuple[tuple[str, int, tuple[str, str, str]], ...] = (
    ("desk lamp", 3990, ("black", "white", "brass")),
    ("office chair", 18900, ("grey", "black", "blue")),
    ("water bottle", 1850, ("red", "green", "steel")),
    ("hiking boots", 12950, ("size 40", "size 42", "size 44")),
    ("rain jacket", 8900, ("small", "medium", "large")),
    ("coffee grinder", 6490, ("black", "red", "silver")),
    ("wool blanket", 5400, ("cream", "navy", "rust")),
    ("headphones", 14900, ("white", "black", "sand")),
    ("backpack", 7650, ("olive", "black", "blue")),
    ("tea kettle", 4475, ("copper", "white", "green")),
    ("running shoes", 10950, ("size 39", "size 41", "size 43")),
    ("bath towel", 2290, ("white", "teal", "grey")),
    ("picture frame", 1640, ("oak", "black", "walnut")),
    ("bicycle helmet", 6900, ("small", "medium", "large")),
    ("garden hose", 3380, ("10 m", "20 m", "30 m")),
    ("bookshelf", 15900, ("oak", "white", "black")),
    ("yoga mat", 2995, ("purple", "blue", "grey")),
    ("alarm clock", 2480, ("white", "black", "mint")),
    ("frying pan", 4990, ("20 cm", "24 cm", "28 cm")),
    ("winter gloves", 3150, ("small", "medium", "large")),
)

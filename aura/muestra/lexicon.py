"""Words of the built-in corpus by meaning, so that people eat food and open doors and not the other way round.

NOUNS: class | adjectives that suit it (^ may also stand before the noun) | nouns, with gender where it cannot be
       guessed (mano:f, mapa:m, agua:F for a feminine that takes el).
ACTIONS: class: verb phrases in the infinitive, parted by ";", written as templates (see text.py); {su:s} and the
       like refer to whoever does it, whatever the person and the tense.
TRADES: trade | where it is done | what it is about (plural, with article) | its actions.
"""

NOUNS = """
fruta | maduro, dulce, jugoso, verde, fresco, recién cogido, ácido, ^pequeño, ^hermoso | manzana, pera, naranja,
  cereza, ciruela, fresa, uva, sandía, granada, mandarina, higo, melocotón, albaricoque:m, limón, plátano, mango,
  kiwi, mora, frambuesa, papaya, piña, guayaba, níspero, membrillo, castaña, nuez:f, almendra, avellana, dátil,
  pomelo
verdura | tierno, fresco, recién cortado, verde, grande, ^pequeño, de la huerta, bien lavado | zanahoria, calabaza,
  lechuga, cebolla, berenjena, acelga, col:f, coliflor:f, alcachofa, tomate:m, pepino, pimiento, puerro, rábano,
  calabacín, espárrago, nabo, patata, remolacha, lombarda, judía, haba:F, endibia, espinaca
plato | sabroso, casero, abundante, sencillo, exquisito, riquísimo, ^buen, típico de la comarca | sopa de pescado,
  guiso de lentejas, tortilla de patatas, arroz con verduras:m, cocido, potaje de garbanzos:m, empanada de atún,
  ensalada de tomate, estofado de ternera, caldo de gallina, paella, crema de calabaza, puré de patatas:m, lasaña,
  gazpacho, revuelto de setas, pescado al horno, menestra, pisto, ceviche:m, empanada de maíz, sancocho, locro,
  pollo con arroz, sopa de ajo, arroz con mariscos:m, guiso de judías
dulce | casero, recién hecho, dorado, tierno, delicioso, ^pequeño | bizcocho, rosquilla, magdalena, buñuelo,
  galleta, pastel de crema, bollo, churro, hojaldre:m, torrija, barquillo, alfajor, mantecado, pestiño, empanadilla,
  mazapán, polvorón
horneado | casero, dorado, esponjoso, tierno | bizcocho, magdalena, galleta, tarta de manzana, pastel, bollo,
  roscón, hojaldre:m, alfajor
pelable | grande, fresco, tierno, ^pequeño | patata, zanahoria, cebolla, tomate:m, pepino, nabo, remolacha, manzana,
  pera
hervible | fresco, tierno, recién cortado | patata, zanahoria, acelga, alcachofa, judía verde, espinaca, haba:F,
  puerro, espárrago
frito | fresco, cortado en rodajas | patata, berenjena, calabacín, pimiento, alcachofa, cebolla
cortable | maduro, dulce, jugoso | manzana, pera, piña, mango, melocotón, plátano, naranja, papaya, fresa
fruto | seco, ^pequeño, caído del árbol | nuez:f, bellota, castaña, avellana, almendra, piñón, mora
bebida | riquísimo, delicioso | café, té:m, chocolate:m, zumo de naranja, vaso de leche, agua de limón:F,
  manzanilla, limonada, caldo, horchata, infusión de menta, sidra, mosto, taza de tila, café con leche
mueble | viejo, de madera, de pino, antiguo, pesado, desvencijado, recién pintado, ^pequeño, ^enorme, elegante |
  mesa, silla, sillón, cama, armario, sofá:m, banco, estantería, cómoda, mecedora, taburete:m, escritorio, aparador,
  baúl, butaca, cuna, perchero, librería, vitrina, alacena
recipiente | vacío, de barro, de cristal, desportillado, limpio, ^viejo, ^pequeño, azul, blanco | taza, vaso, jarra,
  olla, cazuela, botella, tarro, cuenco, cesta, cubo, caldero, tetera, cántaro, frasco, tinaja, jarrón
vasija | de barro, azul, blanco, fino, ^pequeño, ^enorme | jarra, taza, cuenco, cántaro, tinaja, jarrón, plato,
  tetera, cazuela
cajón | viejo, de madera, enorme | cajón, armario, maleta, cofre:m, baúl, alacena, caja, mochila, bolso, cómoda
escrito | breve, ilustrado, largo, divertido, triste, ^nuevo | cuento, poema:m, carta, artículo, relato, ensayo,
  soneto, crónica
extensión | verde, solitario, inmenso, silencioso, cubierto de niebla, ^extenso | valle:m, llanura, bosque:m,
  sierra, desierto, pradera, meseta, páramo, viñedo, olivar, trigal, selva
altura | lejano, pelado, nevado, cubierto de pinos, solitario, ^pequeño | monte:m, colina, sierra, cerro, loma,
  peña, cumbre:f
coche | viejo, nuevo, rojo, blanco, azul, abollado, ^pequeño | coche:m, autobús, camión, furgoneta, taxi, tractor,
  moto:f
herramienta | oxidado, nuevo, afilado, pesado, útil, prestado, ^viejo, de buena marca | martillo, sierra, azada,
  pala, llave inglesa:f, destornillador, tijera de podar, hacha:F, rastrillo, cepillo, lima, tenaza, serrucho,
  taladro, escalera, brocha, cuerda, carretilla
ropa | nuevo, viejo, gastado, de lana, de algodón, azul, rojo, gris, elegante, demasiado grande, remendado, bien
  planchado, ^bonito | abrigo, bufanda, camisa, chaqueta, sombrero, jersey, pañuelo, gorra, chaleco, gabardina,
  boina, chaquetón, cazadora, capa, delantal, gorro, impermeable:m, uniforme:m, corbata, pijama:m, túnica, poncho
calzado | nuevo, gastado, cómodo, sucio, de cuero, elegante, ^viejo | zapato, bota, sandalia, zapatilla, alpargata
edificio | antiguo, moderno, abandonado, de piedra, de ladrillo, blanco, restaurado, ^enorme, ^viejo, ^pequeño |
  casa, iglesia, torre:f, escuela, molino, palacio, fábrica, castillo, ermita, caserón, granero, faro, estación,
  teatro, almacén, hospital, convento, mercado, biblioteca, museo, ayuntamiento, posada
lugar | tranquilo, concurrido, cercano, ^viejo, ^pequeño, ^nuevo | plaza, mercado, biblioteca, parque:m, estación,
  puerto, farmacia, panadería, cine:m, teatro, museo, escuela, oficina de correos, ayuntamiento, frutería, hospital,
  zapatería, librería, ferretería, café, polideportivo, piscina, centro de salud, pescadería, taller, cafetería,
  peluquería, archivo
habitación | oscuro, luminoso, frío, vacío, recién pintado, silencioso, ^pequeño, ^amplio, desordenado | cocina,
  sala, dormitorio, comedor, despacho, desván, sótano, patio, pasillo, terraza, baño, salón, despensa, galería,
  trastero, portal
abrible | de madera, de hierro, pesado, cerrado con llave, pintado de verde, ^viejo, ^pequeño | puerta, ventana,
  caja, cajón, armario, cofre:m, baúl, verja, portón, alacena, arcón, ventanuco
legible | interesante, ilustrado, gastado por el uso, amarillento, recién publicado, difícil, divertido, ^antiguo,
  ^breve, ^largo, ^viejo | libro, novela, carta, periódico, revista, cuento, poema:m, diario, manual, informe:m,
  crónica, biografía, catálogo, ensayo, comedia, leyenda, artículo, enciclopedia
objeto | antiguo, valioso, gastado, brillante, de plata, de familia, muy querido, ^pequeño, ^viejo, ^curioso |
  llave:f, reloj, anillo, moneda, fotografía, medalla, brújula, navaja, collar, pluma, broche:m, pulsera, dedal,
  mechero, cuaderno, sortija, lupa, silbato, camafeo, llavero, monedero, abanico, farol, peine:m, catalejo, caja de
  música, sello, amuleto
reliquia | de oro, de plata, de bronce, muy bien conservado, ^pequeño, ^antiguo | moneda, anillo, medalla, broche:m,
  collar, camafeo, amuleto, sello, sortija, dedal, peine:m, puñal, copa, espejo, llave:f
juguete | roto, nuevo, de madera, de trapo, de colores, ^viejo, ^pequeño | muñeca, pelota, cometa, tren, peonza,
  rompecabezas:m, barco, marioneta, caballo de cartón, tambor, coche de hojalata:m, globo, canica, trompeta,
  patinete:m
aparato | averiado, moderno, ruidoso, recién comprado, de segunda mano, ^viejo, útil | radio:f, lavadora, lámpara,
  ventilador, televisor, nevera, aspiradora, teléfono, plancha, máquina de coser, cámara, tostadora, calentador,
  horno, impresora, ordenador, batidora, estufa
vehículo | viejo, nuevo, lento, rápido, abollado, rojo, blanco, azul, prestado, ^pequeño | coche:m, autobús, tren,
  camión, bicicleta, moto:f, barca, carro, furgoneta, tranvía:m, taxi, barco, tractor, velero
instrumento | afinado, antiguo, de segunda mano, prestado, heredado, desafinado, ^viejo | guitarra, violín, piano,
  flauta, trompeta, tambor, acordeón, arpa:F, clarinete:m, laúd, bandurria, charango, violonchelo, órgano, armónica,
  pandereta
doméstico | dócil, travieso, hambriento, perezoso, asustado, flaco, cariñoso, manso, ^pequeño, ^viejo, blanco, negro
  | perro, gato, caballo, burro, gallina, oveja, cabra, vaca, conejo, pato, mula, cordero, ternero, gallo, tortuga,
  canario, hurón, yegua
mascota | blanco, negro, perezoso, flaco, cariñoso, asustado, ^viejo, ^pequeño | perro, gato, conejo, tortuga,
  cachorro, perdiguero, galgo, podenco, mastín
silvestre | astuto, veloz, tímido, salvaje, silencioso, hambriento, ^pequeño, ^viejo | zorro, lobo, jabalí, ciervo,
  liebre:f, ardilla, erizo, tejón, lince:m, nutria, comadreja, cabra montés, corzo, garduña, gamo
ave | ruidoso, blanco, negro, gris, solitario, de paso, ^pequeño | golondrina, gorrión, cigüeña, águila:F, búho,
  halcón, gaviota, garza, mirlo, ruiseñor, paloma, cuervo, jilguero, lechuza, grulla, perdiz:f, urraca, petirrojo,
  vencejo, milano, buitre:m, cóndor, colibrí
insecto | diminuto, inquieto, brillante, laborioso, ^pequeño | abeja, hormiga, mariposa, grillo, avispa, libélula,
  mariquita, escarabajo, saltamontes:m, mosca, mosquito, cigarra, luciérnaga
árbol | centenario, frondoso, desnudo, alto, torcido, seco, en flor, ^viejo, ^enorme | olmo, encina, roble:m, pino,
  olivo, almendro, cerezo, nogal, ciprés, castaño, chopo, higuera, manzano, álamo, haya:F, fresno, abedul, sauce:m,
  tilo, ceiba, jacarandá:m, naranjo, limonero, laurel, acacia
flor | blanco, rojo, amarillo, fresco, perfumado, recién cortado, ^hermoso, ^pequeño | rosa, margarita, amapola,
  violeta, clavel, azucena, jazmín, geranio, lirio, girasol, orquídea, tulipán, hortensia, camelia, dalia, magnolia,
  buganvilla, petunia, narciso
paisaje | profundo, lejano, verde, silencioso, solitario, inmenso, cubierto de niebla, ^hermoso, ^extenso,
  desconocido | valle:m, río, monte:m, llanura, bosque:m, playa, colina, lago, sierra, desierto, costa, laguna,
  arroyo, isla, sendero, barranco, cañón, pradera, selva, bahía, acantilado, cascada, páramo, meseta, ladera,
  viñedo, olivar, trigal
camino | estrecho, largo, empinado, polvoriento, de tierra, empedrado, solitario, ^viejo | calle:f, camino, sendero,
  carretera, callejón, avenida, paseo, cuesta, vereda, pista, travesía, atajo
sonido | lejano, extraño, débil, agudo, repentino, sordo, constante, ^leve | ruido, campana, silbido, murmullo,
  grito, motor, canción, golpe:m, risa, guitarra, zumbido, crujido, aullido, trueno, portazo, sirena, voz:f, eco
sentimiento | profundo, repentino, inmenso, difícil de explicar, ^enorme, ^extraño | alegría, tristeza, miedo,
  sorpresa, nostalgia, curiosidad, alivio, ternura, esperanza, inquietud:f, emoción, melancolía
pesar | profundo, repentino, inmenso, ^enorme, ^extraño | tristeza, rabia, inquietud:f, angustia, pena, nostalgia,
  temor, melancolía, preocupación
gozo | profundo, sereno, inmenso, difícil de explicar, ^enorme, ^extraño | alegría, alivio, ternura, esperanza,
  gratitud:f, entusiasmo, emoción, calma
idea | sencillo, difícil, brillante, arriesgado, interesante, urgente, absurdo, razonable, ^nuevo, ^buen | idea,
  plan, problema:m, propuesta, pregunta, proyecto, solución, decisión, sueño, consejo, respuesta, promesa, teoría,
  costumbre:f, descubrimiento
documento | importante, urgente, firmado, incompleto, detallado, ^nuevo, ^largo | contrato, factura, informe:m,
  solicitud:f, certificado, recibo, presupuesto, acta:F, permiso, reglamento, formulario, inventario, testamento
evento | anual, gratuito, popular, solidario, multitudinario, al aire libre, ^gran, ^pequeño | feria, concierto,
  fiesta, exposición, concurso, carrera, festival, mercado de artesanía, taller de cerámica, obra de teatro, torneo
  de ajedrez, ciclo de cine, jornada de puertas abiertas, encuentro de poesía, certamen de pintura, desfile:m,
  conferencia, lectura pública
asignatura | difícil, interesante, obligatorio | historia, geografía, química, física, música, biología, literatura,
  filosofía, dibujo, álgebra:F, latín, inglés, francés, astronomía
tela | suave, áspero, blanco, estampado, de rayas, fino, grueso | manta, sábana, cortina, alfombra, toalla, mantel,
  cojín, tapete:m, servilleta, colcha
herida | leve, profundo, antiguo | rodilla, mano:f, espalda, hombro, tobillo, muñeca, cabeza, pie:m, codo, dedo,
  muela, garganta, oído, cuello
obra | público, necesario, urgente, costoso, ^nuevo, ^pequeño | puente:m, carretera, piscina, escuela, biblioteca,
  parque:m, depósito de agua, carril bici, centro de salud, residencia, mercado, estación de autobuses,
  aparcamiento, paseo peatonal, invernadero, polideportivo
vivienda | blanco, antiguo, luminoso, de piedra, de dos plantas, con balcón, con huerto, ^pequeño, ^viejo, ^humilde,
  ^modesto | casa, cabaña, casona, piso, ático, buhardilla, granja, caserío, apartamento
fenómeno_primavera | intenso, persistente, repentino, débil, ^fuerte | lluvia, tormenta, granizada, vendaval,
  chubasco, aguacero
fenómeno_verano | intenso, persistente, repentino, ^fuerte | tormenta, ola de calor, vendaval, granizada, aguacero,
  sequía
fenómeno_otoño | intenso, persistente, débil, ^fuerte | lluvia, niebla, vendaval, chubasco, llovizna, temporal
fenómeno_invierno | intenso, persistente, débil, ^fuerte | nevada, helada, niebla, temporal, ventisca, lluvia
borrasca | intenso, violento, repentino, ^fuerte | tormenta, temporal, vendaval, aguacero, tromba de agua, granizada
grupo | numeroso, entusiasta, improvisado, formado por vecinos, ^pequeño, ^nuevo | asociación, coro, equipo,
  cuadrilla, banda de música, club de lectura, cooperativa, compañía de teatro, comisión, orquesta, peña, patrulla
asiento | cómodo, duro, de madera, libre, ^viejo | banco, silla, sillón, butaca, taburete:m, mecedora, piedra,
  escalón, sofá:m, tronco
"""

ACTIONS = """
hogar: barrer {el:habitación}; fregar los platos; lavar {el:tela+}; planchar {el:ropa+}; limpiar {el:mueble+};
  ordenar {el:habitación}; tender la ropa; coser {un:ropa}; hacer la cama; encender la lámpara; abrir las ventanas
  de {el:habitación}; sacudir {el:tela}; pintar {el:habitación}; guardar {el:ropa} en {el:cajón}; arreglar
  {el:aparato+}; regar {los:flor}; cambiar las sábanas; poner {un:recipiente} sobre la mesa; quitar el polvo de
  {el:mueble}; vaciar {el:cajón}; doblar {el:tela}; remendar {un:ropa+}; sacar la basura; cerrar {el:abrible+};
  mover {el:mueble+} hasta {el:habitación}; encerar el suelo; dar de comer a {el:doméstico}; bajar a [el sótano|la
  bodega|el patio]; subir a buscar {un:recipiente}; apagar {el:aparato}; engrasar [la cerradura|las bisagras|el
  cerrojo]
cocina: preparar {un:plato+}; cocinar {un:plato}; hervir {unos:hervible}; pelar {unos:pelable+}; cortar
  {unos:cortable} en trozos; probar {el:plato}; calentar [la leche|el caldo|el café|el pan]; servir {el:bebida} en
  [una taza|un vaso|la mesa]; hornear {unos:horneado}; freír {unos:frito}; batir [unos|dos|tres|cuatro] huevos;
  amasar el pan; poner la mesa; lavar {unos:fruta}; llenar {un:recipiente+}; remover el guiso; encender el horno;
  echar sal a {el:plato}; llevar {unos:dulce} a la mesa; comprar {unos:fruta} y {unos:verdura}; buscar
  {un:recipiente+}; exprimir [unos limones|unas naranjas]; copiar la receta de {unos:dulce+}; picar [una cebolla|un
  ajo|un poco de perejil]
mesa: comer {un:plato+}; tomar {un:bebida}; beber {un:bebida}; probar {un:dulce+}; comer {un:fruta+}; probar
  {un:plato+}; tomar {un:plato}; compartir {un:dulce}; pedir {un:bebida} y {un:dulce}
calle: ir a {el:lugar+}; pasar por {el:lugar}; comprar {un:legible+}; comprar {unos:fruta}; cruzar {el:camino+};
  caminar hasta {el:lugar}; esperar el autobús; saludar a los vecinos; pasear por {el:camino+}; preguntar el precio
  de {un:ropa+}; llevar {un:aparato} a arreglar; recoger un paquete en [la oficina de correos|la estación]; entrar
  en {un:lugar+}; mirar los escaparates; echar una carta al buzón; sentarse en un banco de la plaza; pagar [la
  luz|el alquiler|una factura]; subir por {un:camino+}; dar un rodeo por {el:camino}; detenerse ante {un:edificio+};
  seguir {un:camino+}; bajar hasta {el:camino}; devolver {un:legible} en la biblioteca; pedir cita en [la
  peluquería|el ayuntamiento|el centro de salud]; hacer la compra
campo: sembrar {unos:verdura}; regar el huerto; podar {el:árbol}; recoger {unos:fruta+}; cavar la tierra; dar de
  comer a {los:doméstico}; cortar leña; plantar {un:árbol}; arreglar la valla; ordeñar las cabras; cuidar
  {los:doméstico}; buscar setas en el bosque; arrancar las malas hierbas; cargar el carro de leña; llevar
  {los:verdura} al mercado; subir a {un:altura+}; beber agua del arroyo; contemplar {un:paisaje+}; bañarse en el
  río; seguir las huellas de {un:silvestre}; escuchar el canto de {un:ave}; descansar a la sombra de {un:árbol+};
  cruzar {un:extensión+}; atar [el burro|la mula|el caballo|la yegua] a {un:árbol}; observar {un:ave+} desde lejos;
  limpiar el establo; recoger {unos:flor}; llenar un cántaro en la fuente; afilar [el hacha|la azada|la sierra];
  encender una hoguera
ocio: leer {un:legible+}; escuchar la radio; tocar {el:instrumento}; jugar a las cartas; jugar al ajedrez; pintar
  {un:paisaje+}; escribir {un:escrito+}; dibujar {un:ave}; ver una película; bailar con los amigos; cantar una
  canción [vieja|alegre|triste]; hacer fotografías de {un:paisaje}; resolver un crucigrama; coleccionar
  {unos:objeto}; asistir a {un:evento+}; aprender a tocar {el:instrumento}; montar en bicicleta; visitar
  {un:edificio+}; organizar {un:evento}; tejer [una bufanda|un jersey|un gorro|un poncho]; construir [una cometa|un
  barco de juguete|una casa de muñecas]; volar una cometa; mirar las estrellas; releer {un:legible+}; hojear
  {un:legible}; ensayar con [el coro|la banda|la orquesta]
estudio: estudiar {-:asignatura}; repasar la lección; tomar apuntes; consultar {un:legible+}; buscar una palabra en
  el diccionario; preparar un examen de {-:asignatura}; hacer los deberes; preguntar las dudas; leer {un:legible} en
  voz alta; traducir {un:escrito+}; subrayar {un:legible}; resolver tres problemas de {-:asignatura}; matricularse
  en un curso de {-:asignatura}; corregir los errores; llenar un cuaderno de notas
rutina: levantarse temprano; ducharse con agua fría; desayunar {un:bebida} con {unos:dulce}; vestirse deprisa;
  peinarse ante el espejo; mirar por la ventana; ponerse {un:ropa+}; salir de casa a {hora:7-9}; abrir la ventana;
  lavarse la cara; regar {los:flor} de [la terraza|el patio|el balcón]; leer el periódico; preparar {un:bebida}; dar
  de comer a {el:doméstico}; despertarse antes de tiempo; hacer la cama; escuchar las noticias; buscar las llaves
  por toda la casa; coger el autobús de siempre; encender la radio; bajar a comprar el pan
noche: acostarse tarde; apagar la luz de {el:habitación}; leer unas páginas de {un:legible+}; cerrar {el:abrible};
  dormirse enseguida; mirar las estrellas desde [la terraza|el balcón|la azotea|la ventana]; escribir unas líneas en
  {su:s} diario; tomar {un:bebida} antes de dormir; quedarse pensando en {un:idea+}; soñar con {un:paisaje+};
  preparar {el:ropa} para el día siguiente; cenar {un:plato}; sentarse junto al fuego; repasar las cuentas; escuchar
  el viento; poner el despertador a {hora:6-8}
viaje: hacer la maleta; comprar un billete de tren; llegar a la estación; subir a {un:coche}; visitar
  {un:edificio+}; recorrer {un:extensión+}; preguntar el camino; alojarse en una posada; perderse por las calles;
  hacer fotografías de {un:edificio+}; probar {un:plato+}; comprar {un:objeto} de recuerdo; cruzar {un:extensión+}
  en [tren|coche|autobús|bicicleta]; consultar el mapa; despedirse de la familia; mandar una postal; caminar hasta
  {un:paisaje+}; esperar [dos|tres|cuatro] horas en la estación; contemplar {un:paisaje} desde [una torre|un
  mirador|el tren]; alquilar {un:coche+}; subir a {un:altura+}; dormir en {un:vivienda+}; conocer a gente nueva;
  aprender unas palabras de otra lengua; comer {un:plato} en una taberna
buscar: mirar debajo de {el:mueble}; vaciar {el:cajón}; revisar los bolsillos de {el:ropa}; registrar
  {el:habitación}; mover {el:mueble+}; recorrer {el:camino}; preguntar en {el:lugar}; levantar {el:tela}; buscar
  entre {los:legible}; abrir {el:abrible+}; volver a {el:lugar}; mirar dentro de {un:recipiente}; rebuscar en
  {el:habitación}; subir a [el desván|la azotea|la buhardilla]; mirar detrás de {el:mueble}
ayuda: llevar {un:plato} a los vecinos; prestar {un:herramienta}; repartir mantas; encender velas; hervir agua;
  acompañar a los ancianos; tapar las goteras del tejado; recoger ramas del camino; cuidar de los niños; sacar agua
  del sótano; traer leña seca; contar historias a los niños; ofrecer un sitio junto al fuego; preparar {un:bebida}
  para todos; compartir {unos:dulce}; sujetar las ventanas con cuerdas; calentar caldo; buscar {un:herramienta} para
  los vecinos; abrir la puerta a los que llegaban; ordenar {el:habitación}
costumbre: leer {-s:legible}; visitar {-s:edificio}; coleccionar {-s:objeto}; dibujar {-s:ave}; pintar {-s:paisaje};
  preparar {-s:dulce}; cultivar {-s:flor}; cultivar {-s:verdura}; escribir {-s:escrito}; tocar {el:instrumento};
  estudiar {-:asignatura}; plantar {-s:árbol}; arreglar {-s:aparato}; restaurar {-s:mueble}; observar {-s:ave};
  comer {-s:fruta}; jugar al ajedrez; jugar a las cartas; escuchar la radio; montar en bicicleta; nadar en el río;
  cocinar para los amigos; bailar hasta tarde; cantar en el coro; hacer fotografías; ver películas antiguas; viajar
  en tren; ir al teatro; pasear sin rumbo; aprender canciones; resolver crucigramas; contar cuentos a los niños;
  mirar las estrellas; tejer {-s:tela}; escuchar música; fabricar {-s:juguete}; hablar con los vecinos; leer poemas
  en voz alta; caminar por el monte; remendar {-s:ropa}; hornear {-s:horneado}; fotografiar {-s:insecto}; copiar
  recetas; levantarse temprano; acostarse tarde; sentarse al sol
tierra: sembrar {-s:verdura}; cuidar {los:doméstico}; regar el huerto; podar {los:árbol}; recoger {-s:fruta}; cortar
  leña; buscar setas; vender {-s:verdura} en el mercado; ordeñar las cabras; plantar {-s:árbol}; subir al monte;
  pasear por el campo; bañarse en el río; pescar en el río; dar de comer a {los:doméstico}; arrancar las malas
  hierbas; llevar {los:fruta} al mercado; contemplar el paisaje; observar {-s:ave}; trabajar en la huerta; recoger
  {-s:flor}; escuchar el canto de {los:ave}; limpiar el establo; descansar a la sombra de {los:árbol}; caminar por
  {un:extensión}; criar {-s:doméstico}
trayecto: mirar por la ventanilla; leer {un:legible+}; dormir un poco; comer {un:fruta+}; hablar con un desconocido;
  contar las estaciones; pensar en el pasado; compartir {unos:fruta} con una viajera; cruzar {un:extensión+}; ver
  pasar {los:ave}; dejar atrás {un:paisaje+}; escribir unas líneas en {su:s} cuaderno; escuchar {un:sonido}
mar: remar hasta la otra orilla; recoger conchas; nadar un rato; coser las redes; mirar el horizonte; izar la vela;
  caminar por la playa; oír las gaviotas; buscar cangrejos entre las rocas; contar los barcos del puerto; dormir la
  siesta en la arena
animal: dormir bajo {un:árbol+}; beber en el arroyo; buscar comida entre las hojas; esconderse en [el bosque|unos
  matorrales|una cueva|un tronco hueco]; vigilar el camino; guardar {-s:fruto} para el invierno; correr por el
  monte; mirar la luna; descansar al sol; cruzar el río; olfatear el aire; asustarse de cualquier ruido; perseguir
  {-s:insecto}; comer {-s:fruto}; caminar toda la noche; espiar a {los:ave}
"""

TRADES = """
panadero | la panadería | los panes | amasar la masa; encender el horno; hornear {-s:horneado+}; vender el pan;
  mezclar la harina con el agua; repartir el pan por las casas
carpintero | el taller | los muebles | cortar la madera; lijar {-s:mueble+}; clavar las tablas; barnizar
  {-s:mueble}; medir {-s:mueble}; arreglar {-s:mueble+}
maestro | la escuela | los alumnos | explicar la lección de {-:asignatura}; corregir los cuadernos; leer
  {-s:legible} a los alumnos; escribir en la pizarra; preparar la clase de {-:asignatura}
pescador | el puerto | las redes | coser las redes; salir a la mar; vender el pescado; pintar la barca; limpiar el
  pescado; mirar el cielo antes de salir
relojero | la relojería | los relojes | desmontar un reloj [antiguo|de bolsillo|de pared]; ajustar las agujas del
  reloj; limpiar los engranajes; dar cuerda a los relojes; atender a los clientes
jardinero | el jardín | las plantas | podar {el:árbol}; regar {los:flor}; plantar {-s:flor}; barrer las hojas;
  cortar la hierba; abonar la tierra
médico | el consultorio | los pacientes | visitar a los enfermos; recetar un jarabe; atender a los pacientes; tomar
  la tensión a un anciano; lavarse las manos; escribir un informe
bibliotecario | la biblioteca | los libros | ordenar {los:legible}; prestar {-s:legible+}; catalogar {-s:legible};
  recomendar {-s:legible+}; organizar una lectura
zapatero | la zapatería | los zapatos | coser {-s:calzado}; arreglar {-s:calzado+}; cortar el cuero; lustrar
  {-s:calzado}; pegar las suelas
cocinero | el restaurante | las recetas | preparar {-s:plato+}; probar las salsas; pelar {-s:pelable}; escribir el
  menú; comprar {-s:verdura+} en el mercado; afilar los cuchillos
librero | la librería | los libros | ordenar los estantes; recomendar {-s:legible+}; envolver {-s:legible}; abrir
  las cajas de novedades; leer junto al mostrador
cartero | la oficina de correos | las cartas | repartir las cartas; subir por {un:camino+}; ordenar los sobres;
  entregar un paquete; recorrer las calles en bicicleta
modista | el taller de costura | los vestidos | coser {-s:ropa+}; cortar la tela; tomar medidas; planchar {-s:ropa};
  enhebrar la aguja
agricultor | el campo | las cosechas | sembrar {-s:verdura}; arar la tierra; recoger {-s:verdura+}; regar el huerto;
  arreglar el tractor; mirar las nubes
veterinario | la clínica | los animales | curar {-s:doméstico+}; vacunar {-s:doméstico}; visitar una granja; vendar
  la pata de {un:doméstico}; atender a {un:doméstico+}
músico | el conservatorio | las partituras | afinar {el:instrumento}; ensayar una pieza [nueva|difícil]; tocar
  {el:instrumento}; copiar partituras; dar un concierto
pintor | el estudio | los cuadros | pintar {-s:paisaje+}; mezclar los colores; dibujar {-s:flor+}; limpiar los
  pinceles
alfarero | el alfar | las vasijas | modelar {-s:vasija+}; amasar el barro; encender el horno; decorar {-s:vasija};
  secar {-s:vasija} al sol
periodista | la redacción | las noticias | entrevistar a un testigo; escribir un artículo; tomar notas; comprobar
  los datos; leer los titulares
electricista | el taller | los cables | arreglar {-s:aparato+}; cambiar una bombilla; revisar la instalación; tirar
  un cable; instalar {-s:aparato}
mecánico | el garaje | los motores | revisar el motor; arreglar {-s:coche+}; cambiar una rueda; engrasar las piezas;
  limpiar las herramientas
apicultor | el colmenar | las colmenas | revisar las colmenas; envasar la miel; encender el ahumador; vender la miel
  en el mercado; cuidar las abejas
florista | la floristería | los ramos | preparar un ramo de {-s:flor}; regar {los:flor}; vender {-s:flor}; cortar
  los tallos
peluquero | la peluquería | los clientes | cortar el pelo; barrer el suelo; peinar a los clientes; escuchar las
  historias del barrio; afilar las tijeras
conductor | la estación | los viajeros | conducir [un autobús|un camión|una furgoneta]; revisar las ruedas; saludar
  a los viajeros; llenar el depósito; consultar el horario
enfermero | el hospital | los enfermos | cuidar a los enfermos; poner inyecciones; cambiar las vendas; tomar la
  temperatura; ordenar las medicinas
abogado | el despacho | los documentos | leer {-s:documento+}; preparar la defensa; redactar {-s:documento}; atender
  a los clientes; revisar {-s:documento}
arquitecto | el estudio | los planos | dibujar un plano; visitar las obras; diseñar {-s:edificio+}; medir el
  terreno; revisar {-s:documento}
fotógrafo | el estudio | los retratos | revelar los retratos; fotografiar {-s:edificio+}; preparar la cámara;
  enmarcar un retrato; esperar la luz de la tarde
herrero | la fragua | los hierros | avivar el fuego; golpear el hierro; forjar [azadas|rejas|cuchillos|cadenas];
  afilar [unas hachas|unos cuchillos|unas azadas]
guardabosques | la casa forestal | los senderos | vigilar el bosque; limpiar los senderos; contar {los:ave}; plantar
  {-s:árbol}; guiar a los excursionistas
tejedor | el telar | las telas | hilar la lana; teñir la lana; tejer {-s:tela+}; preparar el telar; vender {-s:tela}
"""

MEN = """Antonio Manuel José Francisco David Juan Javier Daniel Carlos Jesús Alejandro Miguel Rafael Pedro Ángel
Pablo Sergio Fernando Jorge Luis Alberto Álvaro Adrián Diego Raúl Iván Rubén Óscar Enrique Ramón Vicente Andrés
Joaquín Santiago Eduardo Víctor Mario Roberto Jaime Ignacio Marcos Salvador Ricardo Emilio Hugo Julio Guillermo
Gabriel Tomás Agustín Abel Nicolás Gonzalo Esteban Felipe Lorenzo Julián Mateo Simón Bruno Damián Eusebio Fermín
Matías Leandro Isidro Anselmo Octavio""".split()

WOMEN = """María Carmen Ana Isabel Dolores Pilar Teresa Rosa Cristina Ángeles Laura Antonia Mercedes Lucía Elena
Francisca Concepción Marta Sara Paula Raquel Rosario Beatriz Juana Silvia Irene Patricia Nuria Rocío Julia Andrea
Alba Inés Manuela Encarnación Sofía Clara Esther Daniela Amparo Alicia Margarita Claudia Lorena Natalia Valeria
Gloria Luisa Susana Yolanda Olga Eva Catalina Emilia Victoria Carolina Amelia Lidia Noelia Consuelo Aurora Soledad
Ofelia Graciela Ximena Leonor Matilde Josefina""".split()

SURNAMES = """García Rodríguez González Fernández López Martínez Sánchez Pérez Gómez Martín Jiménez Ruiz Hernández
Díaz Moreno Muñoz Álvarez Romero Alonso Gutiérrez Navarro Torres Domínguez Vázquez Ramos Gil Ramírez Serrano Blanco
Molina Morales Suárez Ortega Delgado Castro Ortiz Rubio Marín Sanz Núñez Iglesias Medina Garrido Cortés Castillo
Santos Lozano Guerrero Cano Prieto Méndez Cruz Calvo Gallego Vidal León Herrera Márquez Peña Flores Cabrera Campos
Vega Fuentes Carrasco Diez Reyes Caballero Nieto Aguilar Pascual Herrero Santana Montero Hidalgo Giménez
Ibáñez Ferrer Durán Benítez Mora Arias Vargas Carmona Crespo Pastor Soto Sáez Velasco Soler Moya
Parra Bravo Gallardo Rojas Quiroga Salinas Ocampo Paredes Zamora Bustos Cárdenas Orellana""".split()

CITIES = """Sevilla, Valencia, Zaragoza, Málaga, Murcia, Bilbao, Córdoba, Valladolid, Vigo, Gijón, Granada, Oviedo,
Burgos, Salamanca, Cádiz, Toledo, León, Cáceres, Santander, Segovia, Cuenca, Soria, Bogotá, Medellín, Quito,
Guayaquil, Lima, Arequipa, Cuzco, Montevideo, Asunción, Rosario, Mendoza, Valparaíso, Santiago, Guadalajara, Puebla,
Oaxaca, Mérida, Managua, Cartagena, Salta, Sucre, Santa Marta, Tarragona, Almería, Huelva, Jaén, Teruel, Pamplona,
Logroño, Antigua, Trujillo, Tucumán, Morelia, Veracruz""".replace("\n", " ").split(", ")

# Invented towns: a head and a tail, so that no news item speaks of a real one.
TOWN_HEADS = """Torre, Fuente, Villar, Puebla, Casas, Navas, Hoyos, Peña, Ribera, Aldea, Castillo, Puente, Molinos,
Vega, Valle, Cuevas, Huertas, Pozo, Prados, Alto, Barranco, Cerro, Playa, Soto""".replace("\n", " ").split(", ")
TOWN_TAILS = """del Olmo, de la Encina, del Río, de las Ánimas, del Conde, de Arriba, de Abajo, de la Sierra, del
Rey, de los Frailes, de la Reina, del Monte, de las Flores, del Marqués, de la Sal, de los Caballeros, de San Blas,
del Obispo, de Santa Inés, de la Jara, del Fresno, de los Pastores, del Almendro, de la Luz, del Trigo, de San
Lázaro""".replace("\n", " ").split(", ")

RELATIVES = """hermano hermana primo prima tío tía abuelo abuela vecino vecina amigo amiga compañero compañera
padrino madrina sobrino sobrina cuñado cuñada""".split()

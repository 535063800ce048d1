"""The templates of the built-in corpus, one rule after another; text.py explains their marks.

A rule is a name with a colon and its alternatives, one per "- "; what is indented continues the line above. In
  stories
p is the protagonist (first or third person), q a relative or friend, r somebody else; in letters p writes to r (tú).
"""

RULES = """
época:
- hace [muchos|algunos|bastantes|ya treinta|más de veinte] años
- en aquel tiempo
- por aquellos días
- en {=año}
- hacia {=año}
- cuando aún no había [teléfono|luz eléctrica|carretera|agua corriente] en la comarca
- el año de [la gran nevada|la sequía|las inundaciones|la buena cosecha|las elecciones]
tipo_pueblo:
- [un pueblo|una aldea|una villa] de [trescientos|quinientos|ochocientos|mil|dos mil|pocos] habitantes, [al pie de
  {un:altura+}|a orillas de un río|cerca del mar|en mitad de {un:extensión+}|al final de {un:camino+}]
- [un pueblo|un lugar|un rincón] donde [casi nunca pasaba nada|todos se conocían|las noticias llegaban tarde|el tiempo
  iba más despacio]
- un lugar conocido por [sus {-s:dulce}|{los:dulce}] y por [su feria|sus fiestas|su viejo molino|sus vistas]
clima_primavera:
- [llovía|había llovido] un poco y olía a tierra mojada
- {los:árbol} [estaban en flor|se llenaban de hojas nuevas]
- había llegado la primavera y {los:ave} [volvían a {los:árbol}|hacían sus nidos en los tejados]
- el aire era [tibio|suave|limpio] y el campo estaba lleno de {-s:flor}
- soplaba un viento suave que traía olor a {-s:flor}
- los días eran ya más largos y los niños [jugaban en la calle|volvían tarde a casa]
clima_verano:
- hacía [mucho|demasiado] calor y nadie salía a la calle antes de las [seis|siete]
- el sol caía a plomo sobre {el:camino}
- cantaban las cigarras y no se movía una hoja
- las noches eran [cálidas|largas|claras] y la gente sacaba las sillas a la puerta
- no llovía desde hacía [dos|tres|varios] meses
- el aire olía a [trigo seco|tomillo|heno] y los niños se bañaban en el río
clima_otoño:
- las hojas de {los:árbol} [empezaban a caer|cubrían ya el suelo]
- la niebla cubría {el:paisaje} hasta media mañana
- llovía desde hacía [dos|tres|cuatro|varios] días
- los días se acortaban y ya se encendían las chimeneas
- el viento arrastraba las hojas por {el:camino}
- había pasado la vendimia y olía a mosto en todas las calles
clima_invierno:
- nevaba desde [la víspera|el amanecer|hacía dos días]
- hacía un frío que cortaba la cara
- los tejados estaban blancos y salía humo de [todas las|las] chimeneas
- el agua de la fuente se había helado
- anochecía pronto y las calles quedaban vacías
- soplaba un viento helado que bajaba de [la sierra|las montañas|la cumbre]
ambiente:
- [a lo lejos|en la calle|al otro lado de la pared] se oía {un:sonido+}
- {un:ave+} [cruzó el cielo|cantaba en {un:árbol+}|se posó en el tejado]
- olía a [pan recién hecho|leña|café|tierra mojada|cera|ropa limpia|romero]
- [las campanas de la iglesia dieron|el reloj de la plaza dio|el reloj de la torre dio] las
  [tres|cuatro|cinco|seis|siete|ocho|nueve|diez]
- la luz entraba por la ventana y caía sobre {un:mueble+}
- {un:mascota+} dormía [junto a la puerta|al sol|debajo de {un:mueble}|en un rincón]
- en {un:árbol+} cantaba {un:ave}
- por la calle pasó {un:vehículo+}
modo:
- despacio
- sin prisa
- con [mucho|sumo|todo] cuidado
- en silencio
- de buena gana
- con paciencia
- deprisa
- sin pensarlo [dos veces|mucho|más]
- sin decir nada
- con las manos frías
- con más calma que otras veces
- a media tarde
frecuencia:
- todos los días
- [cada mañana|todas las mañanas|cada tarde|casi todas las noches]
- de vez en cuando
- a menudo
- casi siempre
- los [lunes|martes|jueves|sábados|domingos]
- una vez por semana
- de tarde en tarde
después:
- después
- luego
- más tarde
- al rato
- poco después
- al cabo de un rato
- entonces
- a continuación
- al final
- sin perder tiempo
días_después:
- [dos|tres|cuatro|cinco|unos] días después
- [dos|tres|pocas] semanas después
- al cabo de [un mes|dos meses|unas semanas]
- el [lunes|martes|miércoles|jueves|viernes|sábado|domingo] siguiente
- [tres|cuatro|cinco|varios] días más tarde
- una [mañana|tarde] en que nadie lo esperaba
- [un martes|un sábado|un domingo|un jueves] por la [mañana|tarde]
dijo_q:
- <decir|responder|contestar|exclamar|murmurar pret q> {q!}
- <decir|responder pret q> {q!} {tono}
- <añadir|explicar pret q> {q!} {tono}
- <responder pret q> {q!} mientras <@hogar imp q>
- <decir pret q> {q!}, y <sonreír pret q>
dijo_p:
- <decir|responder|contestar|exclamar> {p!}
- <decir> {p!} {tono}
- <contestar> {p!} {tono}
- <responder> {p!}, y <bajar|levantar> la [mirada|cabeza]
preguntó_p:
- <preguntar> {p!}
- <preguntar> {p!} {tono}
- <querer> saber {p!}
preguntó_q:
- <preguntar pret q> {q!}
- <preguntar pret q> {q!} {tono}
- <querer pret q> saber {q!}
tono:
- en voz baja
- muy despacio
- con [una sonrisa|curiosidad|calma|tristeza|alegría|ternura|firmeza]
- sin [levantar la vista|mirar a nadie|dudar|perder la calma]
- desde [la puerta|la ventana|el pasillo|la escalera]
- después de [un silencio|pensarlo un momento|un rato]

inicio:
- {época}, {yo:p} <vivir imp> en {=pueblo}, {tipo_pueblo}. <ser imp> {=oficio} y {frecuencia} <@@trabajo imp> y
  <@@trabajo imp>.
- {yo:p} <ser imp> {=oficio} en {=pueblo}, {tipo_pueblo}. {frecuencia}, antes de [empezar el trabajo|entrar en
  {=taller}], <@rutina imp> y <@rutina imp>. {clima@est}.
- {clima@est}. {yo:p}, que <ser imp> {=oficio} en {=pueblo}, <acabar imp> de <@@trabajo inf> cuando [empezó esta
  historia|empezó todo|ocurrió lo que se cuenta aquí].
- {época} todo era distinto en {=pueblo}. {yo:p} <tener imp> [entonces|por entonces] {edad:19-68} y <trabajar imp> en
  {=taller}: <@@trabajo imp>, <@@trabajo imp> y, cuando <tener imp> tiempo, <@costumbre imp>.
- En {=pueblo}, {tipo_pueblo}, <vivir imp> {yo:p}, {=oficio} de profesión. {no_rico}. {clima@est}.
- Esta historia [ocurrió|sucedió|empezó] en {=pueblo} una [mañana|tarde|noche] de {=est}. {clima@est}, y {yo:p}, que
  <ser imp> {=oficio}, <tener imp> que <@@trabajo inf>.
- {cuando_joven}, {yo:p} <trabajar imp> en {=taller} de {=pueblo}. <levantarse imp> a {hora:5-7}, <@rutina imp> y no
  <volver imp> a casa hasta {hora:7-9} de la noche. {frecuencia} <@costumbre imp>.
cuando_joven:
- de joven
- hace tiempo
- durante muchos años
- antes de casarse
no_rico:
- no <ser imp> ric{o:p}, pero <tener imp> {un:vivienda+} y [buenos|pocos] amigos
- <vivir imp> en {un:vivienda+} con {un:mascota+} y no <necesitar imp> mucho más
- <tener imp> fama de [ser muy trabajad{or:p}|no perder nunca la calma|hablar poco|saber escuchar]
- [nadie|ninguna persona] en el pueblo conocía [{=materia}|aquel oficio] mejor que {yo:p}
gusto:
- {a:p} {le:p} gustaba <@costumbre inf> y <@costumbre inf>
- {le:p} gustaba <@tierra inf> cuando <terminar imp> el trabajo
- {frecuencia} <@costumbre imp> con {q}
- los días de fiesta <@costumbre imp> o <@calle imp>
- cuando <estar imp> triste, <@hogar imp>
- nunca <acostarse imp> sin antes <@hogar inf>
interludio:
- aquel día <@calle> y <@calle>. {después} <@hogar> {modo}. {ambiente}.
- {p} <@mesa> y, {modo}, <@hogar>. {pensar}.
- a {hora:9-12} <@calle>; a {hora:4-7}, <@ocio>. {ambiente}.
- {p} no <querer> pensar más en aquello. <@hogar>, <@cocina> y, {después}, <@noche>.
- mientras <@@trabajo imp>, {p} <recordar> el día en que <@viaje plus> con {q}. {ambiente}.
- {clima@est}. {p} <@cocina> y <llamar> a {q!} para que <@mesa subi q> {con:p}.
- si <haber subi> tenido más tiempo, <@ocio cperf>; pero aquel día <tener imp> que <@@trabajo inf>.
pensar:
- <pensar|creer imp> que [todo se arreglaría|al día siguiente vería las cosas con más calma|no había remedio]
- <sentir> {un:sentimiento++}
- no <poder imp> dejar de pensar en {un:idea+}
- <tener imp> {un:sentimiento++} que no <saber imp> explicar
- <decidir> que [al día siguiente|esa misma semana] <@calle cond>
noche_mala:
- aquella noche {p} casi no <dormir>. {insomnio}, {insomnio} y <oír> [dar las dos|dar las tres|cantar el gallo|la
  lluvia hasta el amanecer].
- por la noche, {p} <tardar> mucho en dormir{se:p}. {insomnio} y {insomnio}. Después <soñar> con {un:paisaje+} y con
  {un:silvestre+}.
- antes de acostarse, {q} <@noche pret q>; {yo:p}, en cambio, <quedarse> despiert{o:p} hasta las [dos|tres|cuatro]:
  {insomnio} y {insomnio}.
insomnio:
- <leer> unas páginas de {un:legible+}
- <beber> un vaso de agua
- <mirar> por la ventana
- <encender> la luz [dos|tres|varias] veces
- <repasar> lo ocurrido
- <contar> las horas
- <escuchar> {un:sonido}
- <levantarse> a cerrar {el:abrible}
mañana_después:
- A la mañana siguiente, {p} <@rutina> y <@rutina>. {clima@est}.
- Al amanecer, {p} <@rutina>, <@rutina> y <salir> a la calle.
- El [lunes|martes|miércoles|jueves|viernes] <levantarse> antes que nadie, <@rutina> y <@rutina>. {ambiente}.
consuelo:
- No te preocupes, {=np}: [todo tiene arreglo|mañana será otro día|encontraremos una solución|otras veces ha sido
  peor]
- Si quieres, [te ayudo|vamos al mercado|lo pensamos con calma]
- Cuando yo era [pequeñ{o:q}|joven], me pasó algo parecido y [salió bien|no lo he olvidado|aprendí mucho]
- Lo que tienes que hacer es <@calle inf> y no pensar más en ello
- Es mejor que <@mesa subj 1> y que <descansar subj 1>
- Yo en tu lugar <@calle cond 0> y después <@costumbre cond 0>
charla:
- —¿Qué {le_pasa}, {=np}? —{preguntó_q}.¶—[Nada|Nada importante|Una tontería|No lo sé] —{dijo_p}—. [Es que no he
  dormido|Estoy pensando|Luego te lo cuento].¶—{consuelo} —{dijo_q}.
- —¿Te acuerdas de cuando <@viaje pret 3>? —{preguntó_q}.¶—Claro que me acuerdo. [Hacía|Aquel día hacía]
  [frío|calor|viento] y tú llevabas {un:ropa+}.¶—Pues [este año|en {=mes}|cuando quieras] podríamos volver —{dijo_q}.
- —¿Ya <@calle perf 1>? —{preguntó_q}.¶—Todavía no. Antes tengo que <@@trabajo inf>.¶—{consuelo} —{dijo_q}.
- —Ayer <@calle pret 0> —<decir|contar pret q> {q!}— y me encontré con [el cartero|la maestra|el médico|mi prima|un
  viejo amigo]. Me preguntó por ti.¶—¿Y qué le dijiste?¶—Que <estar imp 1> bien y que siempre <@costumbre imp 1>.
  ¿Hice mal?¶—No, [hiciste bien|al contrario|en absoluto] —{dijo_p}.
- —¿Quieres que <@cocina subj 0>? —{preguntó_q}.¶—[No, gracias|Bueno|Como quieras] —{dijo_p}—. <@mesa perf 0> hace un
  rato.
le_pasa:
- te pasa
- te ocurre
- tienes
reflexión:
- {p!} <comprender> entonces que {sabiduría}.
- desde aquel día, {p!} {frecuencia_baja} <olvidar> que {sabiduría}.
- «{sabiduría}», <pensar> {p!} mientras <@hogar imp>.
- {q} solía decir que {sabiduría}; {yo:p} no lo <entender> hasta aquella [tarde|noche|mañana].
frecuencia_baja:
- no
- nunca
- jamás
sabiduría:
- [las cosas|las personas] se conocen mejor cuando [faltan|se pierden|se esperan]
- nadie es demasiado viejo para aprender
- [quien|el que] ayuda a un vecino se ayuda a sí mismo
- la paciencia vale más que la fuerza
- no hay [viaje|trabajo|camino] pequeño cuando se hace con buena compañía
- lo que se busca lejos está, a veces, muy cerca
- una promesa cumplida vale más que cien palabras
- equivocarse también es una manera de avanzar
- [compartir|repartir] lo poco que se tiene lo hace más grande
- el tiempo pone cada cosa en su sitio
- un buen consejo no siempre llega de quien más sabe
- el miedo se hace pequeño cuando se cuenta
- hay puertas que solo se abren desde dentro
- quien escucha aprende dos veces
fin:
- Desde entonces, {frecuencia}, {p} <@costumbre pres> y <acordarse pres> de [aquel día|aquellos días|{=aquella_est}].
- Han pasado [muchos años|diez años|veinte años|varios inviernos], pero {p} todavía <guardar pres> [aquel recuerdo|la
  memoria de aquel día] como [un tesoro|si hubiera ocurrido ayer].
- {q} y {yo:p} <@mesa pret pq> para celebrarlo. {ambiente}. {reflexión}
- {reflexión}
- Aquella noche, {p} <@noche> y <dormirse> en paz. {clima@est}.
- Y así terminó [aquel asunto|aquella historia|todo]: {q} <@mesa pret q>, {yo:p} <@ocio>, y en {=pueblo} no se habló
  de otra cosa durante [semanas|un mes|varios días].
- Si alguien <pasar pres 2> hoy por {=pueblo}, todavía puede oír esta historia: la cuentan {frecuencia}, junto al
  fuego, los que la vieron.

historia:
- {t_perdido}¶{inicio} {gusto}.¶{perdido_1}¶{perdido_2}¶{noche_mala} {mañana_después}¶{perdido_3}¶{perdido_4}¶{fin}
- {t_hallazgo}¶{inicio}¶{hallazgo_1}¶{hallazgo_2}¶{charla}¶{hallazgo_3}¶{hallazgo_4}¶{fin}
- {t_carta}¶{inicio} {gusto}.¶{carta_1}¶{charla}¶{carta_2}¶{carta_3}¶{carta_4}¶{fin}
- {t_tormenta}¶{inicio}¶{tormenta_1}¶{tormenta_2}¶{tormenta_3}¶{tormenta_4}¶{fin}
- {t_música}¶{inicio} {gusto}.¶{música_1}¶{música_2}¶{interludio}¶{música_3}¶{música_4}¶{fin}
- {t_concurso}¶{inicio}¶{concurso_1}¶{concurso_2}¶{charla}¶{concurso_3}¶{concurso_4}¶{fin}
- {t_ruido}¶{inicio} {gusto}.¶{ruido_1}¶{ruido_2}¶{interludio}¶{ruido_3}¶{ruido_4}¶{fin}
- {t_viaje}¶{inicio}¶{viaje_1}¶{viaje_2}¶{viaje_3}¶{viaje_4}¶{fin}
- {t_salvar}¶{inicio}¶{salvar_1}¶{salvar_2}¶{charla}¶{salvar_3}¶{salvar_4}¶{fin}
- {t_vecino}¶{inicio} {gusto}.¶{vecino_1}¶{vecino_2}¶{interludio}¶{vecino_3}¶{vecino_4}¶{fin}
- {t_negocio}¶{inicio}¶{negocio_1}¶{negocio_2}¶{charla}¶{negocio_3}¶{negocio_4}¶{fin}
- {t_día}¶{inicio} {gusto}.¶{día_1}¶{charla}¶{día_2}¶{día_3}¶{fin}

t_perdido:
- {el:x=objeto} perdid{o:x}
- La historia de {un:x=objeto}
- ¿Dónde está {el:x=objeto}?
- {un:x=objeto} en {=pueblo}
perdido_1:
- [Una mañana|Una tarde|Un día] de {=mes}, {p} <buscar> {el:x} que había sido de {su:p} [padre|madre|abuelo|abuela] y
  no {lo:x} <encontrar>. <@buscar>, <@buscar> y <@buscar>. {el:x} había desaparecido.
- {p} <guardar imp> en {un:cajón+} {un:x} de [familia|mucho valor|otros tiempos], y {frecuencia} {lo_sacaba}. Pero el
  {=dia_y_fecha}, al <@hogar inf>, <ver> que {el:x} no estaba en su sitio. <@buscar> y <@buscar>, pero fue inútil.
- Todo empezó cuando {p} <notar> que {le:p} faltaba {el:x}. «{lo_tenía}», <pensar>. <@buscar>. Nada. <@buscar>.
  Tampoco.
lo_tenía:
- {lo:x} tenía ayer
- {lo:x} dejé aquí mismo
- {lo:x} habré dejado en {el:habitación}
- no puede estar lejos
lo_sacaba:
- {lo:x} <sacar imp> para mirar{lo:x}
- {lo:x} <limpiar imp> con un paño
- {lo:x} <enseñar imp> a quien quisiera ver{lo:x}
perdido_2:
- —¿Has visto {el:x}? —<preguntar> {p!} a {q}.¶—¿{el:x} de {su_tu} [abuelo|abuela|madre|padre]? No. ¿Has mirado en
  {el:habitación}?¶—He mirado en todas partes: <@buscar perf 0> y <@buscar perf 0>.¶—{consuelo} —{dijo_q}.
- {p} <contar pret p> lo ocurrido a {q}, que <escuchar pret q> sin interrumpir y {después} <decir pret q>:¶—Piensa un
  poco: ¿qué hiciste ayer?¶—Pues <@rutina pret 0>, <@calle pret 0> y <@calle pret 0>.¶—Entonces [hay que|tenemos que]
  ir al mismo sitio y preguntar.
- {q} y {yo:p} <@buscar pret pq> y <@buscar pret pq>. A {hora:6-9} <sentarse pret pq> en {un:asiento+}, con
  {un:pesar++} que no se podía ocultar.¶—{consuelo} —{dijo_q}.
su_tu:
- tu
perdido_3:
- <volver> sobre {sus:p} pasos. <@buscar>. {después} <@calle> y <preguntar> a {r}, pero {él:r} no sabía nada.¶—Si
  aparece, se lo diré —<prometer pret r> {r!}—. ¿Cómo es?¶—{como_es} —{dijo_p}.
- Aquel día <@buscar> y <@calle>. [Nadie|Ningún vecino] había visto {el:x}. Solo {r} <recordar pret r> [algo|un
  detalle]: la víspera, {un:ave+} [andaba|daba vueltas] por el tejado de {=taller}.
como_es:
- [No es muy grande|Es pequeñ{o:x}] y [está gastad{o:x}|brilla mucho|tiene una letra grabada]. No vale mucho dinero,
  pero para mí vale más que nada
- Es de [plata|cobre|madera|hueso] y tiene [dos letras grabadas|una fecha|una raya en un lado]
perdido_4:
- {días_después}, mientras <@hogar imp>, {p} <oír> un golpe. Algo había caído [al suelo|detrás de {el:mueble}].
  <agacharse> y <sonreír>: era {el:x}. Había estado todo el tiempo [dentro de {un:calzado}|entre dos tablas|en el
  forro de {un:ropa}|debajo de {un:tela}].
- Fue {q} quien <encontrar pret q> {el:x}. Estaba en el nido de [una urraca|un cuervo|un mirlo|una corneja], en lo
  alto de {un:árbol+}, junto a [una cuchara|dos botones|un trozo de cristal]. {p} {lo:x} <coger> {modo} y {lo:x}
  <apretar> en la mano.¶—{consuelo_fin} —{dijo_q}.
- {días_después}, [llamaron|alguien llamó] a la puerta. Era {r!}. Traía {el:x} envuelt{o:x} en {un:ropa}.¶—Estaba
  cerca de {el:lugar} —<decir pret r>—. {lo:x} vi brillar entre las piedras y me acordé de usted.¶{p} no <saber> qué
  decir. Le <dar> las gracias y le <ofrecer> {un:bebida} con {unos:dulce}.
consuelo_fin:
- Ya ves que no estaba tan lejos
- Te lo dije: todo aparece
- La próxima vez, mira hacia arriba

t_hallazgo:
- {el:y=mascota} de {=pueblo}
- {un:y=mascota} en la puerta
- cómo llegó {un:y=mascota} a [casa|{=pueblo}]
- {el:y=mascota} sin dueño
hallazgo_1:
- Un día, al volver de {el:lugar}, {p} <encontrar> en {el:camino} {un:y}
  [flac{o:y}|herid{o:y}|solitari{o:y}|asustad{o:y}]. No llevaba marca ni parecía de nadie. Cuando <acercarse>, {el:y}
  no se movió: [solo levantó la cabeza y esperó|se quedó quiet{o:y}, temblando|se dejó acariciar].
- [Llovía a mares|Hacía una noche oscura|Era casi de noche] cuando {p} <oír> [un ruido|un gemido|unos golpes] detrás
  de la puerta. La <abrir> {modo}: era {un:y} [pequeñ{o:y}|negr{o:y}|blanc{o:y}], con [una pata herida|mucha
  hambre|los ojos muy abiertos].
- Después de <@calle inf>, {p} <sentarse> en {un:asiento+} y entonces <darse> cuenta de que {un:y} {lo:p} seguía desde
  {el:lugar}. {lo:y} <querer> espantar, pero {el:y} no se fue.
hallazgo_2:
- {p} <decidir> llevar{lo:y} a casa. {lo:y} <secar> con {un:tela}, {le:y} <dar> de comer y {le:y} <preparar> un rincón
  en {el:habitación}. A {q} no le <gustar pret 2> la idea, pero <acabar pret q> por aceptarla.
- —No puede quedarse aquí —{dijo_q}—. Será de alguien.¶—Y si no es de nadie, ¿quién {lo:y} va a cuidar?
  —{preguntó_p}.¶{q} <mirar pret q> a {el:y} y no <saber pret q> qué responder. Aquella noche, {el:y} durmió [junto al
  fuego|en {el:habitación}|debajo de {un:mueble}].
- Durante [dos|tres|cuatro] días, {p} <preguntar> por todo el pueblo: <entrar> en {el:lugar}, <pasar> por {el:lugar} y
  <hablar> con todos los vecinos. Nadie había perdido {un:y}.
hallazgo_3:
- {días_después}, {r} <llamar pret r> a la puerta.¶—Buenas [tardes|noches] —<decir pret r>—. Me han dicho que tiene
  usted {un:y} que se perdió en {=mes}.¶{p} <sentir> {un:pesar++}, pero {le:r} <pedir> que pasara.
- {días_después}, al <@calle inf>, {p} <leer> un cartel: «Se ha perdido {un:y}. Responde al nombre de
  [Canela|Lucero|Nube|Pirata|Sombra|Chispa]. Se gratificará». Debajo estaba el nombre de {r} y una dirección. {p}
  <guardar> el papel en el bolsillo y <pensar> en ello toda la tarde.
hallazgo_4:
- {el:y} [corrió hacia|reconoció a|no se apartaba de] {r}, que {lo:y} <abrazar pret r> sin decir nada. {después}
  <querer pret r> pagar, pero {p} no lo <consentir>. —[Venga a verl{o:y}|Puede venir a verl{o:y}] cuando quiera
  —<decir pret r> al despedirse—. En mi casa siempre habrá {un:plato} para usted.
- {p} <ir> a ver a {r} y le <contar> la verdad: que {el:y} estaba [bien|san{o:y} y salv{o:y}] y que {le:p} costaba
  separar{se:p} de {él:y}. {r} <escuchar pret r> en silencio. —Yo ya no tengo edad para cuidarl{o:y} —<decir pret r>
  por fin—. Quédesel{o:y}, y que sea feliz.
- Al día siguiente, {p} <devolver> {el:y} a {r}. La casa quedó [vacía|demasiado silenciosa]. Pero {días_después} {r}
  <volver pret r> con {una_caja}: dentro dormían dos crías que apenas abrían los ojos. —Una es para usted —<decir pret
  r>.
una_caja:
- una caja de cartón
- una cesta tapada con un paño
- un bulto envuelto en una manta

t_carta:
- la carta de {=ciudad}
- una carta con retraso
- [veinte|treinta|doce|quince] años después
- lo que trajo el cartero
carta_1:
- Un [lunes|martes|jueves|viernes] de {=mes} llegó una carta sin remite. {p} la <abrir> {modo}. Decía:
  «[Querid{o:p}|Mi querid{o:p}] {=np}: no sé si te acordarás de mí. Soy {r.}. Hace muchos años que no nos vemos, pero
  no he olvidado el día en que <@campo pret 3>. Ahora vivo en {=ciudad} y me gustaría que vinieras».
- {p} <encontrar> el sobre debajo de la puerta cuando <volver> de <@calle inf>. El sello era de {=ciudad} y la letra,
  de {r.}. «Si todavía me recuerdas —decía—, ven antes de que termine {el_est}. Tengo que darte {un:x=objeto+} que es
  tuy{o:x}».
- La carta tardó [tres|cuatro|cinco|seis] meses en llegar. La firmaba {r.}, con quien {p!} <aprender|estudiar plus>
  {-:asignatura} en la escuela de {=pueblo}. «Me han dicho que eres {=oficio} —escribía—. ¿Todavía <@costumbre pres
  1>? Yo, en cambio, ya no <@costumbre pres 0> nunca».
el_est:
- {=la_est}
- el mes
- el año
carta_2:
- {p} <leer> la carta [dos|tres|cuatro] veces y {después} <pedir> consejo a {q}. —Ve —<decir pret q> {q!}—. Si no vas,
  te arrepentirás siempre.¶Así que <hacer> la maleta, <comprar> un billete y {días_después} <bajar> del tren en
  {=ciudad}.
- No era fácil dejar {=taller}. Pero {q} <ofrecerse pret q> a ocuparse de todo y {yo:p} <salir> de {=pueblo} al
  amanecer. {clima@est}. Durante el viaje <@trayecto> y <@trayecto>; {pensar}.
- «Iré», <decidir> {p}. <escribir> una respuesta, la <echar> al buzón y, el domingo siguiente, <coger|tomar> el primer
  tren. <@trayecto> y <@trayecto>. {clima@est}.
carta_3:
- {=ciudad} era más grande de lo que <recordar imp> {p!}. <@calle> y <preguntar> la dirección a un guardia. La calle
  estaba cerca de {el:lugar}. {p} <llamar> [dos|tres] veces. {ambiente}. Por fin se abrió la puerta.
- En la estación no había nadie. {p} <@mesa> en un café y <seguir> un plano hasta {el:lugar}. Allí, junto a
  {un:árbol+}, <esperar imp r> {r.}, con el pelo blanco y la misma mirada de siempre.
- La casa de {r.} era {un:vivienda++}. En la puerta había {un:doméstico+} y, en la ventana, {unos:flor+}. {p} no
  <atreverse> a llamar hasta que <oír> {un:sonido} dentro.
carta_4:
- —Has tardado —<decir pret r> {r.}.¶—[Veinte años|Treinta años|Toda la vida] —<responder> {p!}.¶<abrazarse pret pr>.
  {después} <@mesa pret pr> y <hablar pret pr> de la vida de cada cual. No hacía falta explicar [mucho|nada|casi
  nada].
- Durante aquella tarde, {r.} <contar pret r> su vida: <@viaje plus r>, <@estudio plus r>, <vivir plus r> en
  [dos|tres|cuatro] países. {p} <hablar> de {=pueblo}, de {q}, de {=materia}. A la hora del adiós, <prometer pret pr>
  que aquella no sería la última vez.

t_tormenta:
- la noche de la [tormenta|crecida|gran lluvia]
- [tres|cuatro|dos] días sin luz
- cuando {=pueblo} se quedó a oscuras
tormenta_1:
- Aquella tarde el cielo [se puso negro|cambió de color|se cubrió de nubes] en pocos minutos. {p} <@hogar imp> cuando
  <oír> un trueno. {después} empezó [la tormenta|el temporal|el diluvio]: nadie recordaba {nada_igual}.
- La radio había anunciado {un:borrasca+}, pero [nadie hizo caso|pocos lo creyeron]. A {hora:5-8}, el viento derribó
  {un:árbol+} y la luz se fue en todo el pueblo. {p} <cerrar> {el:abrible} y <encender> una vela.
- Primero fue el viento; después, el agua. A {hora:8-11}, el río [se salió de su cauce|cubrió el puente|entró en las
  casas de abajo]. {p} <ponerse> {un:ropa+} y <salir> a la calle.
nada_igual:
- nada parecido
- una cosa igual
- un temporal así desde hacía [veinte|treinta|cuarenta] años
tormenta_2:
- {q} <llegar pret q> poco después, con {el_pelo}. —¡El agua está entrando en la escuela! —<gritar pret q>—. ¡Hay que
  avisar a todos!¶{p} no <esperar> más: <buscar> {un:herramienta+} y una linterna, y <correr pret pq> calle abajo.
- —¿Estáis bien? —<gritar pret q> {q!} desde la calle.¶—¡Sí! —<contestar> {p!}—. ¿Y los demás?¶—Falta {r.}. Nadie
  {lo:r} ha visto desde esta mañana.¶Sin decir más, {p} <coger> {un:herramienta} y <salir>.
- En la plaza se habían reunido los vecinos. Unos llevaban mantas; otros, {-s:herramienta}. {r} <explicar pret r> que
  el camino estaba cortado y que nadie vendría hasta el día siguiente. «Tendremos que arreglarnos solos», <pensar>
  {p!}.
el_pelo:
- el pelo empapado
- la ropa llena de barro
- una linterna en la mano
tormenta_3:
- Durante toda la noche, {q!} y {yo:p} <trabajar pret pq> sin descanso, igual que los demás. Unos <@ayuda imp 5>;
  otros <@ayuda imp 5>. {q} <@ayuda pret q> y <@ayuda pret q>. A las [tres|cuatro|cinco] de la madrugada, {el_agua}.
- Llevaron a los ancianos a {el:edificio}. Allí {p} <@ayuda>, <@ayuda> y <@ayuda>. Una niña preguntó si la casa se
  caería; {q} le <contar pret q> un cuento hasta que se durmió.
- En {el:edificio} había más de [cuarenta|cincuenta|sesenta] personas. {p} <@ayuda>; {q} <@ayuda pret q>. Nadie
  hablaba mucho. De vez en cuando se oía {un:sonido+} y todos miraban hacia la puerta.
el_agua:
- dejó por fin de llover
- el viento empezó a calmarse
- el agua dejó de subir
tormenta_4:
- Al amanecer salió el sol. {=pueblo} parecía otro: había ramas en las calles, barro en los portales y {un:z=vehículo}
  volcad{o:z} en mitad de la plaza. Pero no faltaba nadie. {r} <@ayuda pret r> y {p} <@mesa> por primera vez en
  [quince|veinte] horas.
- La luz volvió [dos|tres|cuatro] días después. Para entonces {p} ya <@hogar plus> y los vecinos habían limpiado las
  calles. «Que no vuelva a pasar», decían unos. «Y, si pasa, que estemos juntos», respondían otros.
- Cuando llegó la ayuda de {=ciudad}, casi todo estaba hecho. El alcalde quiso dar un discurso, pero nadie lo escuchó:
  todos dormían.

t_música:
- {el:x=instrumento} de {=np}
- lecciones de {-:x=instrumento}
- {el:x=instrumento} y {=nq}
música_1:
- En {el:habitación} había {un:x} que nadie tocaba desde hacía [años|mucho tiempo|más de diez años]. Un día, {p}
  {lo:x} <limpiar>, {lo:x} <mirar> {modo} y <decidir> que aprendería a tocar{lo:x}.
- {p} <ver> {el:x} en el escaparate de una tienda de {=ciudad}. Costaba {precio:60-900}, más de lo que <ganar imp> en
  un mes. Aun así, <volver> a casa con {él:x}.
- Para su cumpleaños, {q} <querer imp q> una sola cosa: oír otra vez la canción que <cantar imp q> de niñ{o:q}. {p}
  <sacar> {el:x} de {el:habitación}, donde llevaba años olvidad{o:x}, y <buscar> a alguien que {le:p} enseñara a
  tocar{lo:x}.
música_2:
- {r}, que <saber imp r> música, <aceptar pret r> dar{le:p} clases {frecuencia_clase}. Al principio {p} no <distinguir
  imp> una nota de otra. «Otra vez», <decir imp r> {r!}. Y {p} <empezar imp> de nuevo, con {un:gozo++}.
- Las primeras semanas fueron difíciles. {le:p} dolían los dedos, los vecinos protestaban y {el:mascota} huía en
  cuanto <tocar imp> la primera nota. Pero {r} <repetir imp r>: «No tenga prisa. Lo difícil no es empezar, sino
  continuar».
- «¿Cree usted que aprenderé?», <preguntar> {p!}. «Si practica todos los días, sí», <contestar pret r> {r}. Así que
  cada [mañana|tarde|noche], antes de <@noche inf>, <practicar imp> [una hora|media hora].
frecuencia_clase:
- los [martes|jueves|sábados] por la tarde
- una vez por semana
- dos veces por semana
música_3:
- En {=mes}, {p} <tocar> por primera vez delante de otros. Las manos {le:p} temblaban y <equivocarse> en la mitad.
  Hubo un silencio. {q} <levantarse pret q> y <decir pret q>:¶—No importa. Empieza otra vez.
- {p} <estar> a punto de abandonar. <guardar> {el:x} en {el:cajón} y no {lo:x} <volver> a tocar durante [dos|tres]
  semanas. Fue {q} quien {le:p} <preguntar pret q>: «¿Ya no se oye música en esta casa?».
- Un día, sin saber cómo, la canción salió entera. {p} la <repetir> para estar segur{o:p}. {ambiente}. Fuera, alguien
  se había parado a escuchar.
música_4:
- El día de la fiesta, {p} <tocar> la canción hasta el final. {q} la <cantar pret q> en voz baja, con los ojos
  cerrados. Cuando terminó, nadie aplaudió enseguida: {todos_callaban}.
- [Un año|Dos años] más tarde, {p} ya <tocar imp> en las bodas y en las fiestas de la comarca. {r} <estar imp r>
  orgullos{o:r}, aunque nunca lo dijo. Y {q}, {frecuencia}, <pedir imp q> la misma canción.
todos_callaban:
- nadie quería romper el silencio
- todos esperaban que siguiera
- muchos estaban llorando

t_concurso:
- el concurso de {-s:x=horneado}
- {unos:x=horneado} para un jurado difícil
- la receta de {=np}
concurso_1:
- Cada {=est} se celebraba en {=pueblo} un concurso de repostería. {p} nunca <presentarse plus>, pero aquel año {q}
  <escribir pret q> su nombre en la lista sin decir nada a nadie.
- El cartel decía: «Concurso de dulces. Primer premio: {precio:50-600}». {p} lo <leer> [dos|tres] veces. Necesitaba
  aquel dinero para arreglar {el:aparato+}, y además {le:p} gustaba <@cocina inf>.
- —¿Por qué no te presentas? —{preguntó_q}—. Nadie prepara {-s:z=dulce} como {art:z} tuy{o:z}.¶—No digas tonterías
  —<responder> {p!}.¶Pero aquella noche, mientras <@noche imp>, no <poder imp> pensar en otra cosa.
concurso_2:
- {p} <ensayar> durante [una semana|quince días|diez días]. <@cocina>, <@cocina>, <volver> a empezar. La cocina estaba
  llena de harina. {q} <probar imp q> y <opinar imp q>: «Demasiado [dulce|seco|blando]», «Le falta
  [canela|limón|azúcar|tiempo]».
- La receta estaba en un cuaderno de {su:p} abuela, pero la última página se había perdido. {p} <buscar> en
  {el:cajón}, <preguntar> a las vecinas y, por fin, <inventar> lo que faltaba.
- {r} también <presentarse imp r>, y todos sabían que <ganar plus r> [dos|tres|cuatro] veces. «Que gane el mejor»,
  <decir pret r> {r!} cuando <cruzarse pret pr> en {el:lugar}. {p} <sonreír>, aunque no {le:p} hacía ninguna gracia.
concurso_3:
- El día del concurso, el horno se estropeó. {p} <quedarse> mirándolo sin saber qué hacer. —¿Y si usas el mío?
  —{preguntó_q}.¶Tenían menos de [dos horas|una hora]. <correr pret pq> por {el:camino} con la masa en
  {un:recipiente+}, mientras la gente {lo:pq} miraba.
- Faltaban [diez|quince|veinte] minutos cuando {un:mascota+} saltó a la mesa y se comió la mitad. Hubo risas. {p} no
  <enfadarse>: <colocar> lo que quedaba en un plato limpio, lo <adornar> con {unos:flor} y lo <llevar> al jurado.
- {p} <llegar> tarde. En la mesa había [doce|quince|veinte] bandejas, y los dulces de {r} eran los más grandes. El
  jurado probaba, anotaba, volvía a probar. A {hora:12-13} se hizo el silencio.
concurso_4:
- «El primer premio es para…», dijo el alcalde, y tosió. Ganó {r}, pero {p} <quedar> en segundo lugar. {r} <acercarse
  pret r> con un trozo en la mano. —El próximo año ganará usted —<decir pret r>—. ¿Me daría la receta?
- {p} <oír> {su:p} nombre y no lo <creer>. Había ganado. {q} <gritar pret q> de alegría y {r} <correr pret r> a
  felicitar{lo:p}. El premio no era mucho, pero {le:p} pareció una fortuna.
- No <ganar> nada. Sin embargo, cuando el jurado se fue, en {su:p} bandeja no quedaba ni una miga, y
  [tres|cuatro|cinco] personas {le:p} preguntaron la receta.

t_ruido:
- {un:x=sonido} en {el:z=habitación}
- el misterio de la {calle:x}
- ¿quién vive en {el:z=habitación}?
ruido_1:
- Una noche, a {hora:1-3}, {p} <despertarse>: alguien andaba por el piso de arriba. El piso de arriba estaba vacío
  desde hacía [un año|dos años|mucho tiempo]. {p} <escuchar>. {un:sonido+}, después nada, después otro golpe.
- Al principio fue un ruido débil, como de pasos. Luego empezaron a faltar cosas: {un:dulce}, {un:fruta}, un trozo de
  queso. {p} no <creer imp> en fantasmas, pero aquello no era normal.
- {frecuencia}, al dar las [once|doce], se oía un golpe en el tejado. {p} lo <comentar> en {el:lugar}. Unos hablaron
  de ladrones; otros, de {un:ave}. {r} <asegurar pret r> que en aquella casa había vivido una mujer muy extraña.
ruido_2:
- —Será el viento —{dijo_q}.¶—El viento no come {-s:dulce} —<contestar> {p!}.¶{q} <echarse pret q> a reír, pero
  aquella noche <quedarse pret q> a dormir en la casa, por si acaso.
- —¿Y si subimos a ver? —{preguntó_q}.¶—¿Ahora?¶—Ahora. Mañana dirás que lo has soñado.¶{p} <encender> una linterna.
  Los escalones crujían; {ambiente}.
- {p} <preparar> una trampa: <esparcir> harina por el suelo y <dejar> {un:dulce} sobre {un:mueble}. Después <sentarse>
  a esperar con {q}. {clima@est}.
ruido_3:
- A las [dos|tres] de la madrugada se oyó {un:sonido}. {p} <contener> la respiración. La puerta se movió. —¿Quién anda
  ahí? —<gritar pret q> {q!}.¶Nadie respondió.
- Por la mañana había huellas en el suelo, pequeñas y redondas. Iban de la ventana a {el:mueble} y volvían. {p} las
  <mirar> de cerca y <empezar> a sospechar.
- <esperar pret pq> hasta la medianoche, y no ocurrió nada. {p} ya <cerrar imp> los ojos cuando {q} {le:p} <tocar pret
  q> el hombro y <señalar pret q> hacia la oscuridad: allí brillaban dos ojos.
ruido_4:
- Era una [lechuza|gata|ardilla|garduña] con [tres|cuatro] crías. Había entrado por un cristal roto. {p} <decidir> no
  molestarla: <dejar> la ventana abierta y, hasta que terminó {el_est}, {le_llevó}.
- No era un fantasma, sino el nieto de {r}, que tenía [siete|ocho|nueve] años y venía a leer los libros viejos a
  escondidas. {p} no lo <castigar>. —Puedes venir cuando quieras —le <decir>—, pero entra por la puerta.
- La explicación era sencilla: [un gato|un tejón|una ardilla|un erizo|una lechuza|un mapache] había encontrado calor
  en el desván y se comía lo que podía. Cuando {q} lo <contar pret q> en la plaza, todos se rieron, y nadie volvió a
  hablar de fantasmas.
le_llevó:
- nadie subió al desván
- <dejar> cada noche un poco de comida
- <dormir> en {otra_hab}
otra_hab:
- otra habitación
- casa de {q!}

t_viaje:
- el último [tren|autobús] a {=ciudad}
- camino de {=ciudad}
- una noche lejos de casa
viaje_1:
- {p} <tener imp> que estar en {=ciudad} antes del {=dia}: {motivo}. <hacer> la maleta y, a {hora:6-8}, <salir> con
  {q} de {=pueblo}. {clima@est}.
- Nunca <salir plus> de {=pueblo}. Por eso, cuando <recibir> la invitación, {p} no <saber> si reír o llorar.
  {motivo2}. {q} <decir pret q> que {lo:p} acompañaría.
- El viaje debía durar [cuatro|cinco|seis] horas. {p} <llevar imp> {un:ropa+}, {un:legible} y una bolsa con
  {unos:fruta}. {q}, que {siempre_ex}, <llevar imp q> tres maletas.
motivo:
- allí se celebraba {un:evento+}
- {le:p} habían ofrecido un trabajo
- se casaba una prima
- <tener imp> que firmar {un:documento+}
motivo2:
- se trataba de {un:evento+}
- iba a ser un viaje largo
- el billete costaba {precio:20-300}
siempre_ex:
- no <saber imp q> viajar de otro modo
- <tener imp q> miedo de olvidar algo
- siempre <exagerar imp q>
viaje_2:
- A mitad de camino, {averiado}. El conductor bajó, miró el motor y se encogió de hombros. No había casas cerca: solo
  {un:paisaje++} y {un:árbol}. —Yo no pienso quedarme aquí —{dijo_q}—. Caminemos.
- En la estación de {ciudad2} {perdieron}. No había otro tren hasta el día siguiente. {p} <sentarse> en {un:asiento} y
  <contar> el dinero: {le:p} quedaban {precio:5-40}.
- Todo iba bien hasta que {p} <darse> cuenta de que el paisaje no era el que <esperar imp>. —¿Este tren va a
  {=ciudad}? —<preguntar> al revisor.¶—No —<responder pret 2> él—. Va a {ciudad2}. Tendrá que bajarse en la próxima.
averiado:
- el autobús se averió
- una rueda se rompió
- un árbol caído cortó la carretera
perdieron:
- <perder pret pq> el tren
- {le:pq} robaron las maletas
- <equivocarse pret pq> de autobús
ciudad2:
- {sitio:ciudad}
- {sitio:pueblo}
viaje_3:
- <andar pret pq> más de [dos|tres] horas. {ambiente}. Ya era de noche cuando <ver pret pq> una luz. Era la casa de
  {r}, que {le:pq} <abrir pret r> la puerta sin preguntar nada y {le:pq} <servir pret r> {un:plato}.
- Una persona que había oído la conversación se acercó. Era {r}. —Mi {casa_es} está a dos pasos —<decir pret r>—. No
  es un palacio, pero hay sitio. Mañana {yo_mismo}.
casa_es:
- casa
- taller
yo_mismo:
- les acompañaré al tren
- los llevo yo en mi furgoneta
- encontraremos una solución
viaje_4:
- Aquella noche <@mesa pret pq>, <@noche pret pq> y <hablar pret pq> con {r!} hasta muy tarde. Al día siguiente
  <llegar pret pq> a {=ciudad}, tarde y con sueño, pero nadie {le:pq} reprochó nada. Años después, {p} no <recordar
  imp> casi nada de la ciudad; de aquella casa, en cambio, lo <recordar imp> todo.
- {r} <cumplir pret r> su palabra. A {hora:9-11} <estar imp pq> en {=ciudad}. {p} <querer> pagarle el viaje y {él:r}
  no lo <consentir pret r>. —Ya me lo devolverá usted —<decir pret r>— cuando alguien llame a su puerta.

t_salvar:
- salvar {el:x=edificio}
- {el:x=edificio} de {=pueblo}
- una firma más por {el:x=edificio}
salvar_1:
- {el:x} de {=pueblo} llevaba [diez|veinte|treinta] años cerrad{o:x}. Un día de {=mes}, {p} <leer> en el periódico que
  iban a derribar{lo:x} para hacer un aparcamiento. <sentir> {un:pesar++}: allí <@ocio plus>, allí <aprender plus> a
  leer.
- —Van a vender {el:x} —<decir|anunciar pret q> {q!}—. Lo ha dicho el alcalde.¶—¿Vender{lo:x}? ¡Pero si es lo más
  antiguo que tenemos! —<exclamar> {p!}.¶—Pues si nadie hace nada, en {=est} ya no existirá.
- En {=pueblo} nadie se acordaba de {el:x} hasta que llegaron las máquinas. {p} las <ver> desde {el:lugar} y no lo
  <pensar> más: <ponerse> delante.
salvar_2:
- Al día siguiente, {q} y {yo:p} <poner pret pq> una mesa en la plaza para pedir firmas. El primer día <conseguir pret
  pq> [doce|quince|nueve]; el segundo, [cuarenta|treinta y una|veintidós]; el sábado, más de [cien|doscientas]. {r}
  <traer pret r> las de toda su calle.
- Hubo una reunión en {el:lugar}. Unos decían que era inútil; otros, que costaría demasiado. {p} <levantarse> y
  <decir>:¶—Si cada uno da una hora a la semana, lo haremos. No hace falta ser rico: hace falta querer.
salvar_3:
- {clima@est}, pero nadie faltó. Unos <@ayuda imp 5>; otros limpiaban las paredes; los niños {recogían}. {r}, que
  <saber imp r> de obras, <revisar pret r> el tejado. {p} <@hogar> y {q} <@cocina pret q> para todos.
- <trabajar pret pq> durante [cinco|seis|ocho] meses. Hubo días malos: faltó el dinero, cayó {un:borrasca+}, se rompió
  una viga. Una tarde, {p} <pensar> que no lo <lograr cond pq>. —Mañana seguimos —<decir pret q> {q!}.¶Y <seguir pret
  pq>.
recogían:
- recogían clavos
- llevaban agua
- pintaban las puertas
salvar_4:
- El {=dia} se abrieron las puertas. Hubo {un:evento}, {unos:dulce} y demasiados discursos. {p} <entrar> {el_último},
  cuando ya no quedaba nadie, y <mirar> las paredes blancas. {ambiente}.
- El ayuntamiento cambió de opinión en {=mes}. «Si los vecinos {lo:x} quieren tanto —dijo el alcalde—, no seremos
  nosotros quienes {lo:x} tiremos». Hoy, en {el:x} hay [una biblioteca|una escuela de música|un pequeño museo].
el_último:
- al final
- solo al anochecer
- muy tarde

t_vecino:
- la ventana de enfrente
- la casa de al lado
- quien llegó en {=mes}
vecino_1:
- En {=mes}, {r.} <alquilar pret r> la casa de al lado. <llegar pret r> con {un:doméstico+}, [tres|cuatro|cinco] cajas
  y {un:x=objeto+} que no <soltar imp r> ni un momento. No <saludar pret r> a nadie.
- La casa de enfrente había estado vacía desde que murió su dueño. Por eso, cuando {p} <ver> luz en la ventana,
  <llamar> a {q}.¶—Se ha mudado alguien —<decir>—. [Trae|Ha traído] {un:instrumento}, {un:mueble} y muchos
  libros.¶Pronto se supo que {art:r} recién llegad{o:r} se llamaba {r.}.
vecino_2:
- Pronto empezaron los rumores. Que si {r.} <huir imp r> de algo, que si <ser imp r> muy ric{o:r}, que si de noche
  <@noche imp r>. {p} no <hacer imp> caso, pero tampoco <atreverse imp> a llamar a su puerta.
- {p} <observar imp> a {r.} desde la ventana. Por las mañanas, {r.} <@rutina imp r>; por las tardes, <@costumbre imp
  r>. Nunca recibía visitas. «Nadie puede vivir así», <pensar imp> {p!}.
vecino_3:
- Una tarde, {p} <preparar> {un:plato} y <cruzar> la calle. {ambiente}. La puerta tardó en abrirse.¶—Vivo al lado
  —<decir> {p!}—. He hecho demasiada comida y he pensado que quizá…¶{r.} {lo:p} <mirar pret r> con
  [sorpresa|curiosidad|los ojos muy abiertos]. —Pase —<responder pret r>—. Estaba a punto de cenar sol{o:r}.
- Un día, {r.} <caerse pret r> en la escalera. {p} <oír> el golpe y <correr> a ayudar{lo:r}. Mientras <esperar imp pr>
  al médico, <hablar pret pr> por primera vez. Resultó que ambas familias venían de {=ciudad}.
vecino_4:
- Desde entonces, {frecuencia}, {r.} y {yo:p} <@mesa imp pr> y <hablar imp pr> de todo. {r.} <contar pret r> por qué
  había venido a {=pueblo}: quería empezar de nuevo. —Se puede empezar muchas veces —<decir> {p!}.
- {r.} <quedarse pret r> en {=pueblo} para siempre. <@ocio pret r>, <@campo pret r> y hasta <organizar pret r>
  {un:evento}. Los que habían hablado mal se callaron, y alguno llegó a pedir perdón.

t_negocio:
- {=la_tienda} de {=np}
- se abre a las nueve
- el primer cliente
negocio_1:
- {p} <llevar imp> años soñando con tener un negocio propio. Con los ahorros de [cinco|seis|diez] años <alquilar> un
  local en la calle [Mayor|Nueva|del Pozo|de la Fuente]. Las paredes estaban húmedas y el suelo, roto. <pintar> las
  paredes, <comprar> {un:mueble+} y <poner> un cartel sobre la puerta.
- —¿Una tienda? ¿Aquí? —{preguntó_q}—. ¡Si no pasa nadie!¶—Pasarán —<contestar> {p!}.¶Y <empezar> a trabajar:
  <@hogar>, <@hogar> y <gastar> en la obra {precio:900-9000}.
negocio_2:
- El primer día no entró nadie. El segundo entró una mujer, pero solo quería saber la hora. {p} <esperar imp> detrás
  del mostrador mientras {ambiente_imp}. A {hora:8-9} <cerrar imp> y <@noche imp>.
- Pasó un mes. En la caja había {precio:12-90}. {p} <hacer> cuentas: si no vendía más, en {=est} <tener cond> que
  cerrar. Aquella noche no <dormir>.
ambiente_imp:
- en la calle caía la lluvia
- el reloj avanzaba despacio
- los vecinos pasaban de largo
negocio_3:
- La idea se le ocurrió a {q}. —La gente no viene porque no te conoce —<decir pret q>—. Ofréceles algo. Invítalos.¶Al
  día siguiente, {p} <poner> en la puerta una mesa con {unos:dulce} y {un:bebida}. El primero en pararse fue un niño;
  después, su madre; después, media calle.
- Entonces llegó {r}. <mirar pret r> todo {modo}, <preguntar pret r> el precio de cada cosa y <marcharse pret r> sin
  comprar. Pero al día siguiente <volver pret r> con [cuatro|cinco|seis] amigos.
negocio_4:
- Al cabo de un año, {=la_tienda} era el centro del barrio. Se iba a comprar, pero también a hablar, a leer el
  periódico o a pedir consejo. {p} <contratar> a [un joven|una joven|dos aprendices] y <poder>, por fin, <@costumbre
  inf> los domingos.
- No <hacerse> ric{o:p}. Pero, al terminar {=aquella_est}, {p} <poder> pagar todas las deudas y {le:p} sobraron
  {precio:40-400}. Con ese dinero <comprar> {un:x=instrumento} para {q}, que se lo había ganado.

t_día:
- un día en {=pueblo}
- un [lunes|martes|jueves|sábado] cualquiera
- la jornada de {=np}
día_1:
- Aquel {=dia}, {p} <@rutina>, <@rutina> y <@rutina>. {clima@est}. En la calle <encontrarse> con {r}, que <@calle imp
  r>, y <quedarse> un rato hablando.
- A {hora:6-7} ya estaba en pie. <@rutina>, <@rutina> y, {modo}, <@hogar>. {ambiente}. «Hoy será un buen día»,
  <pensar>.
día_2:
- Por la mañana <@@trabajo> y <@@trabajo>. Hacia las dos, {p} <@mesa> con {q} en un banco de la plaza. {después}
  <@calle pret pq> y <@calle pret pq>.
- El trabajo fue largo: <@@trabajo>, <@@trabajo> y todavía <tener> que <@@trabajo inf>. Cuando <terminar>, eran
  {hora:5-7}. <@calle> y <@calle>.
día_3:
- Al caer la tarde, {p} <@ocio>. {ambiente}. {q} <@cocina pret q> y después <@mesa pret pq>. Nada extraordinario había
  sucedido y, sin embargo, {p} <sentir> {un:gozo++}.
- Antes de que se hiciera de noche, {p} <@campo> y <@campo>. Luego <volver> a casa, <@mesa> y <@noche>. Había sido un
  día como tantos, pero no lo <cambiar cond> por ninguno.

fábula:
- {=nombre_p} y {=nombre_q}¶{fab_inicio}¶{fab_abundancia}¶{fab_escasez}¶{fab_final}¶Moraleja: {sabiduría}.
- {=nombre_p} y {=nombre_q}¶{fab_inicio}¶{fab_apuesta}¶{fab_carrera}¶{fab_meta}¶Moraleja: {sabiduría}.
- {=nombre_p}, {=nombre_q} y el río¶{fab_inicio}¶{fab_peligro}¶{fab_ayuda}¶{fab_gracias}¶Moraleja: {sabiduría}.
fab_inicio:
- Vivían en {un:extensión+} {p} y {q}. {=nombre_p} <@animal imp> y <@animal imp>; {=nombre_q}, en cambio, <@animal
  imp>. [Aunque eran vecinos|A pesar de todo], casi nunca se hablaban.
- Érase una vez {p} que <@animal imp> {frecuencia}. Cerca de allí vivía {q}, que <@animal imp> y <@animal imp>.
  {clima_monte}.
- Cuentan que, en {un:extensión+}, {p} y {q} se encontraron una [mañana|tarde|noche] de {=est}. {clima_monte}.
  {=nombre_p} <@animal imp> y {=nombre_q} <@animal imp>.
fab_abundancia:
- Aquel año hubo mucha comida. {=nombre_p} <trabajar imp> todo el día: <@animal imp>, <@animal imp> y no <descansar
  imp> nunca. {=nombre_q} <reírse imp>. —¿Para qué tanto esfuerzo? —<decir imp>—. Mañana habrá más.
- {=nombre_p} <encontrar> [un manzano|un cerezo|un nogal|una higuera|un castaño|un ciruelo] con mucha fruta y <querer>
  llamar a todos. —No seas tont{o:p} —<decir pret q> {=nombre_q}—. Si lo cuentas, nos quedaremos sin nada.¶{=nombre_p}
  no le <hacer> caso y avisó a {los:ave} y a {los:silvestre}.
fab_escasez:
- Pero llegaron los malos tiempos. durante semanas heló todas las noches, y no quedaba nada que comer. {=nombre_q},
  que no <guardar plus q> ni {un:fruto}, <llamar pret q> a la puerta de {=nombre_p}. —¿Me darías algo? —<preguntar
  pret q> con la voz muy baja.
- Meses después hubo una gran sequía. El arroyo se secó y {los:árbol} perdieron las hojas. {=nombre_q} <buscar pret q>
  por todas partes y no <encontrar pret q> ni {un:fruto}.
fab_final:
- {=nombre_p} <abrir> la puerta. —Pasa —<decir>—. Hay sitio para dos, pero mañana habrá que trabajar.¶Y así lo
  hicieron: desde entonces, {=nombre_q} <@animal imp q> y {=nombre_p} <@animal imp>, y nunca les faltó nada.
- Los que habían comido gracias a {=nombre_p} no lo habían olvidado: uno trajo {unos:fruto}; otro, {unos:fruta}.
  {=nombre_p} lo <repartir> todo, y también {=nombre_q} <recibir pret q> su parte.
fab_apuesta:
- —Yo soy más [rápid{o:q}|fuerte|list{o:q}] que tú —<decir pret q> un día {=nombre_q}.¶—Puede ser —<responder>
  {=nombre_p}—. Si quieres, lo probamos: quien llegue primero a {un:altura} ganará {unos:fruto}.
- {=nombre_q} <presumir imp q> delante de todos: —¡Nadie conoce el monte como yo!¶{=nombre_p}, que lo <oír plus>,
  <levantar> la cabeza. —Entonces no te importará hacer una apuesta —<decir>.
fab_carrera:
- Salieron al amanecer. {=nombre_q} <ir imp q> delante y, como <creer imp q> que tenía tiempo de sobra, <detenerse
  pret q> a perseguir {un:insecto+}. {=nombre_p} no <detenerse>: <cruzar> {un:extensión}, <subir> {un:altura+} y
  <seguir> su camino.
- El camino era largo. {=nombre_q} <tomar pret q> un atajo y <perderse pret q> en {un:paisaje}. {=nombre_p}
  <preguntar> a {un:ave}, que desde el aire lo veía todo, y <llegar> antes de que cayera el sol.
fab_meta:
- Cuando {=nombre_q} <llegar pret q>, {=nombre_p} <esperar imp> a la sombra de {un:árbol+}. —Has tardado —<decir>—.
  ¿Quieres {un:fruto}?¶{=nombre_q} <bajar pret q> la cabeza y, por primera vez, <pedir pret q> perdón.
- Los demás animales lo celebraron. {=nombre_q} <marcharse pret q> en silencio, pero al día siguiente <volver pret q>.
  —Enséñame —<decir pret q>.¶Y {=nombre_p} le <enseñar>.
fab_peligro:
- Una tarde, {=nombre_q} <resbalar pret q> y <caer pret q> al río. La corriente era fuerte. —¡Ayuda! —<gritar imp
  q>.¶Todos miraban desde la orilla: unos decían que era tarde; otros, que no sabían nadar.
- Un día llegaron los cazadores. {=nombre_q}, que <dormir imp q>, no los <oír pret q>, y cuando <querer pret q> huir
  ya <tener imp q> una pata en la trampa.
fab_ayuda:
- {=nombre_p} no lo <pensar>. <buscar> una rama, <llamar> a {los:ave} y entre todos tiraron con fuerza. Costó mucho,
  pero al final {=nombre_q} <salir pret q> con vida.
- —No te muevas —le <decir> {=nombre_p} al oído.¶Y <empezar> a hacer ruido al otro lado, para que los hombres miraran
  hacia allí. Mientras tanto, {un:insecto} y {un:ave} soltaron la cuerda.
fab_gracias:
- —¿Por qué lo has hecho? —<preguntar pret q> {=nombre_q}—. Yo nunca te ayudé.¶—Por eso —<contestar> {=nombre_p}—.
  Alguien tenía que empezar.
- Desde aquel día, {=nombre_q} <cuidar pret q> de los más pequeños y {frecuencia} <contar imp q> lo que había
  ocurrido. {clima_monte}, y en el monte había paz.
clima_monte:
- el viento movía las hojas de {los:árbol}
- el río bajaba [tranquilo|crecido|claro|casi seco]
- [el sol asomaba|la luna asomaba|la niebla se levantaba] por detrás de {un:altura}
- volaban {los:ave} y olía a [romero|tomillo|tierra mojada]

carta:
- {=ciudad}, {=fecha}¶[Querid{o:r}|Mi querid{o:r}|Muy querid{o:r}] {=nr}:¶{carta_saludo}
  {carta_noticia}¶{carta_cuerpo}¶{carta_cuerpo} {carta_recuerdo}¶{carta_pregunta} {carta_plan}¶{carta_adiós}¶{=np}
- {=pueblo}, {=fecha}¶Hola, {=nr}:¶{carta_saludo}¶{carta_noticia} {carta_cuerpo}¶{carta_recuerdo}
  {carta_pregunta}¶{carta_plan} {carta_adiós}¶{=np}¶P. D. {posdata}
- {=pueblo}, {=fecha}¶[Querid{o:r} amig{o:r}|Querid{o:r} {=nr}]:¶{carta_saludo} {carta_recuerdo}¶{carta_cuerpo}
  {carta_noticia}¶{carta_plan}¶{carta_pregunta} {carta_adiós}¶{=np}
carta_saludo:
- ¿Cómo estás? Espero que al recibir esta carta [estés bien|te encuentres mejor|hayas descansado]. Hace
  [semanas|meses|mucho tiempo] que quería escribirte, pero siempre había algo que me lo impedía.
- Recibí tu carta [el lunes|el jueves|ayer|hace dos semanas] y la he leído [dos|tres] veces. Me alegro mucho de que
  por fin <@viaje sperf r>.
- Perdona que no te haya contestado antes. Últimamente <@@trabajo pres 0> a todas horas y, cuando llego a casa, solo
  <@noche pres 0>.
- Te escribo desde {el:habitación}. {ambiente_pres}. Hoy no he tenido que <@@trabajo inf> y por fin puedo contarte
  cómo van las cosas.
- No te imaginas cuánto me acuerdo de ti. Ayer, mientras <@hogar imp 0>, pensé: «Tengo que escribir a {=nr}».
ambiente_pres:
- por la ventana se ve {un:paisaje+}
- en la calle se oye {un:sonido+}
- {un:mascota+} duerme a mis pies
- [llueve|hace sol|hace frío] y la casa está en silencio
carta_noticia:
- Te cuento las novedades: {q} <@viaje perf q> y ahora <@costumbre pres q>. Está content{o:q}, aunque dice que echa de
  menos {el:plato} de casa.
- ¿Sabes que {q} <volver perf q> a estudiar? Esta vez, {-:asignatura}. Dice que quiere ser {un_oficio}. Yo creo que lo
  conseguirá, porque cuando <querer pres 2> algo no para hasta lograrlo.
- Aquí todo sigue igual: yo <@@trabajo pres 0>, {q} <@hogar pres q> y los vecinos discuten por [el ruido|la basura|el
  aparcamiento|las plantas del portal].
- La gran noticia es que hemos comprado {un:vivienda++}. Tiene {un:habitación} y {un:habitación++}. Todavía hay que
  [pintar las paredes|arreglar el tejado|cambiar las ventanas] y [limpiar el jardín|comprar {un:mueble}|revisar la
  luz], pero [nos encanta|estamos felices].
- La semana pasada hubo {un:fenómeno+} y tuvimos que <@ayuda inf> y <@ayuda inf>. No te asustes: estamos todos bien.
un_oficio:
- {oficio:q}
carta_cuerpo:
- El {=dia} pasado estuve con {q!} en {sitio:ciudad}. <@viaje pret 3>, <@viaje pret 3> y al final <@mesa pret 3>. Si
  hubieras estado, <@ocio cperf 3>.
- Desde que <vivir pres 0> aquí, {frecuencia} <@tierra pres 0>. Al principio me costaba, pero ya me he acostumbrado:
  <@rutina pres 0>, <@rutina pres 0> y el día empieza bien.
- Me preguntas por {=taller}. ¿Qué te voy a decir? Antes <@@trabajo imp 0> y ahora <@@trabajo pres 0>. El jefe quiere
  que <@@trabajo subj 0>, pero yo preferiría <@costumbre inf>.
- El otro día encontré {un:objeto+} en {un:cajón+}. ¿Te acuerdas? {lo_regaló}. Sentí {un:sentimiento++}.
- {frecuencia} pienso en {un:idea+}. Quizá <deber cond 0> <@estudio inf> o <@viaje inf>. ¿Tú qué <hacer cond 1> en mi
  lugar?
- Los niños han crecido mucho. El mayor ya <@estudio pres 2>; la pequeña <@costumbre pres 2> y no deja que nadie la
  ayude.
lo_regaló:
- Era del abuelo
- Me lo diste tú cuando terminamos la escuela
- Lo compramos en aquella feria de {=ciudad}
carta_recuerdo:
- ¿Recuerdas {=aquella_est} en que <@mar pret 3> y <@mar pret 3>? Tú <tener imp 1> {un:ropa+} y no querías volver a
  casa.
- Cuando éramos [jóvenes|niños|estudiantes], <@costumbre imp 3> {frecuencia}. Ahora parece que fue ayer.
- A veces paso por {el:lugar} y me parece que vas a salir de pronto, con {el:ropa} de siempre.
- Nunca he olvidado lo que me dijiste: que {sabiduría}.
carta_pregunta:
- Y tú, ¿sigues <@costumbre ger>? ¿Ya <@viaje perf 1>? Cuéntame también si tu [hermano|hermana|vecino|jefa]
  <@costumbre pres 2> todavía.
- Quiero saberlo todo: si <@estudio pres 1>, si <@costumbre pres 1>, si has encontrado [piso|trabajo|tiempo para ti].
- ¿Y tus padres? Dales un abrazo de mi parte y diles que un día de estos <@calle fut 0> y les haré una visita.
- ¿Es verdad que <@viaje fut 1>? Me lo contó {q} y no supe qué responder.
carta_plan:
- En {=mes_próximo} tendré [unos días|una semana|diez días] de vacaciones. Si te parece bien, <ir fut 0> a verte:
  <@viaje fut 3> y <@ocio fut 3>.
- Ojalá <poder subj 1> venir pronto. Te prepararía {un:plato} y <@costumbre cond 3> hasta la noche.
- Cuando <venir subj 1>, te enseñaré {un:paisaje+} que he descubierto. Trae {un:ropa}, porque aquí [refresca|llueve
  mucho|hace viento].
- No sé si podré ir a {el:evento} que organizas, pero haré lo posible. Si no voy, [guárdame|resérvame] {un:dulce}.
carta_adiós:
- Escríbeme pronto. Un abrazo muy fuerte,
- Cuídate mucho y no trabajes demasiado. Te quiere,
- No tardes tanto en contestar como yo. Un beso,
- Recuerdos a todos. Con mucho cariño,
- Hasta pronto. Tu amig{o:p} de siempre,
posdata:
- Te mando {un:objeto} con esta carta. {q} dice que te traerá suerte.
- No olvides devolverme {el:legible} que te presté.
- {q} te manda un abrazo y {unos:dulce}.
- Mi nueva dirección es {calle:x}, número {#2-98}.

carta_formal:
- {firma_dir}¶{=ciudad}, {=fecha}¶{formal_trato}:¶{queja_1}¶{queja_2}¶{queja_3}¶{formal_adiós}¶{=firma}
- {firma_dir}¶{=ciudad}, {=fecha}¶{formal_trato}:¶{empleo_1}¶{empleo_2}¶{empleo_3}¶{formal_adiós}¶{=firma}
- {firma_dir}¶{=ciudad}, {=fecha}¶{formal_trato}:¶{pide_1}¶{pide_2}¶{pide_3}¶{formal_adiós}¶{=firma}
firma_dir:
- {=firma}¬{calle:x}, {#1-120}¬{=ciudad}
formal_trato:
- Muy señores míos
- Estimados señores
- A quien corresponda
- Estimada directora
- Estimado director
queja_1:
- El pasado {=hace_poco} compré en su establecimiento {un:x=aparato++} por {precio:20-900}. A los
  [dos|tres|cinco|diez] días dejó de funcionar, a pesar de que {lo:x} había utilizado siguiendo las instrucciones.
- Les escribo para comunicarles que {el:x=aparato} que adquirí el {=hace_poco}, con la factura número {#1000-9999},
  llegó a mi domicilio [rot{o:x}|incomplet{o:x}|con varios golpes].
- Me dirijo a ustedes por el pedido número {#1000-9999}, que realicé el {=hace_poco}. Había encargado {un:x=mueble++}
  y {lista:unos vasija 2}; hasta hoy no he recibido nada.
queja_2:
- He llamado [tres|cuatro|cinco|seis] veces a su servicio de atención. Cada vez me han dicho algo distinto: que
  esperara una semana, que enviara {un:documento}, que volviera a llamar. Nadie ha sabido darme una solución.
- Acudí en persona a la tienda, donde un empleado me aseguró que {el:x} sería sustituid{o:x} en un plazo de {3-20m}
  días. Ese plazo terminó hace ya [dos|tres|cuatro] semanas.
- Adjunto a esta carta {un:documento} y dos fotografías en las que se aprecia el problema. Como verán, no se trata de
  un uso indebido, sino de un defecto de fábrica.
queja_3:
- Por todo ello, les ruego que me devuelvan el importe de la compra o que, en su defecto, me envíen otr{o:x} {-:x} en
  perfecto estado. De lo contrario, presentaré una reclamación ante la oficina de consumo.
- Solicito, por tanto, que reparen {el:x} sin coste alguno y que me indiquen la fecha en la que podré recoger{lo:x}.
  Confío en que no sea necesario acudir a otras instancias.
- Espero que se pongan en contacto conmigo antes de {8-30m} días. Si me ofrecen una solución razonable, seguiré siendo
  cliente de su casa.
empleo_1:
- He leído en [el periódico|un cartel|el tablón del ayuntamiento] que buscan {un_oficio_o} para {el:edificio} de
  {=pueblo}, y deseo presentar mi candidatura.
- Me dirijo a ustedes con el fin de solicitar el puesto que anunciaron el {=hace_poco}. Tengo {edad:22-58} y vivo en
  {=pueblo}, a pocos kilómetros de su empresa.
un_oficio_o:
- personal con experiencia
- una persona responsable
- personal de confianza
empleo_2:
- Durante [dos|tres|cinco|ocho|diez] años trabajé en una empresa de {=ciudad}, donde me encargaba de [atender a los
  clientes|llevar las cuentas|preparar los pedidos|organizar el almacén]. Además, he cursado estudios de
  {-:asignatura} y de {-:asignatura}, y hablo [inglés|francés|portugués|italiano] con soltura.
- Mi experiencia comenzó en {=año_antes}, como aprendiz. Desde entonces he aprendido a <@@trabajo inf>, a <@@trabajo
  inf> y a trabajar en equipo. En mi último empleo conseguí que las ventas aumentaran un {#4-35} %.
empleo_3:
- Creo que mi formación y mi interés por [aprender|este oficio|el trato con el público] podrían serles útiles. Quedo a
  su disposición para una entrevista, cualquier día a partir de las [nueve|diez|cuatro|cinco].
- Adjunto mi currículum y dos cartas de recomendación. Si lo consideran oportuno, puedo incorporarme en
  {=mes_próximo}.
pide_1:
- En nombre de la asociación de vecinos de {=pueblo}, les escribo para pedir que se construya {un:x=obra++} en el
  barrio. Somos {#120-2400} personas y {art:x} más cercan{o:x} está a {4-28m} kilómetros.
- Los abajo firmantes, vecinos de la {calle:x}, solicitamos que se repare {el:x=camino}, que se encuentra en mal
  estado desde {el:borrasca} del pasado mes de {=mes}.
- Somos un grupo de {12-60m} estudiantes y estamos organizando {un:x=evento++}. Nos gustaría que su institución nos
  cediera {un:habitación+} durante [un día|una tarde|un fin de semana].
pide_2:
- No es la primera vez que lo pedimos. En {=mes} del año pasado entregamos un escrito con {#150-900} firmas, y nos
  aseguraron que el asunto se estudiaría. Desde entonces no hemos tenido noticias.
- Entendemos que los recursos son limitados, pero creemos que el coste, que calculamos en {precio:1200-9800}, sería
  pequeño en comparación con el beneficio. Varios vecinos se han ofrecido a <@ayuda inf> y a <@ayuda inf>.
pide_3:
- Les agradeceríamos que nos recibieran para explicarles la propuesta con detalle. Estamos seguros de que, si nos
  escuchan, llegaremos a un acuerdo.
- Rogamos que nos comuniquen su decisión antes del {3-28} de {=mes_próximo}, a fin de que podamos organizarnos con
  tiempo.
formal_adiós:
- [Atentamente|Reciban un cordial saludo|Les saluda atentamente|Sin otro particular, les saludo atentamente]:
- A la espera de su respuesta, [les saluda|se despide] atentamente:
- Agradezco de antemano su atención. [Un cordial saludo|Atentamente]:

noticia:
- {not_t_obra}¶{not_fecha} {not_obra}¶{not_declara} {not_obra_2}¶{not_vecinos}¶{not_cierre}
- {not_t_evento}¶{not_fecha} {not_evento}¶{not_evento_2} {not_declara}¶{not_vecinos}¶{not_cierre}
- {not_t_tiempo}¶{not_fecha} {not_tiempo}¶{not_tiempo_2} {not_vecinos_mal}¶{not_declara_mal}¶{not_cierre}
- {not_t_hallazgo}¶{not_fecha} {not_hallazgo}¶{not_hallazgo_2}¶{not_vecinos} {not_declara}¶{not_cierre}
not_fecha:
- {=pueblo}, {=dia_y_fecha}.
- {=pueblo}. Redacción.
not_t_obra:
- {=pueblo} tendrá {un:x=obra++}
- el ayuntamiento aprueba {un:x=obra++}
- comienzan las obras de {un:x=obra++} en {=pueblo}
not_obra:
- El ayuntamiento de {=pueblo} ha aprobado la construcción de {un:x}, que costará {precio:40000-900000} y estará
  terminad{o:x} en {=mes} del próximo año. Las obras comenzarán dentro de {2-9f} semanas.
- Después de {2-12m} años de espera, {=pueblo} contará con {un:x}. El pleno lo aprobó anoche por {9-15m} votos a favor
  y {2-6} en contra. La inversión asciende a {precio:60000-800000}.
- Las máquinas llegaron el {=dia} a {=pueblo} para empezar {el:x} que los vecinos reclamaban desde {=año_antes}. En
  los trabajos participan {11-64f} personas.
not_obra_2:
- El proyecto ocupa {#400-9000} metros cuadrados y obligará a cortar [la carretera|la calle principal|el paseo|la
  avenida] durante [dos|tres|cuatro] semanas. Los autobuses se desviarán por la {calle:x}.
- Según el proyecto, se plantarán {#20-300} árboles, entre ellos {lista:-s árbol 3}, y se instalarán {8-40m} bancos.
not_t_evento:
- {=pueblo} celebra {un:x=evento++}
- {un:x=evento++} llega a {=pueblo}
- todo listo para {el:x=evento} de {=pueblo}
not_evento:
- {=pueblo} celebrará [este fin de semana|del viernes al domingo|el próximo sábado] {un:x}. Participarán {#12-90}
  artistas de {3-11m} países y la entrada costará {precio:3-40}.
- Más de [ochocientas|mil|mil quinientas|dos mil|tres mil quinientas|cinco mil|ocho mil] personas asistieron ayer a
  {un:x} en {=pueblo}. Es la {ordinal_f} edición y, según los organizadores, la más concurrida hasta ahora.
- {un:x} llenó ayer de gente las calles de {=pueblo}. A {hora:10-12} no quedaba un asiento libre, y {un:grupo+} abrió
  el acto con una canción popular.
ordinal_f:
- [segunda|tercera|cuarta|quinta|sexta|séptima|octava|novena|décima]
not_evento_2:
- El programa incluye {lista:un evento 3}. Además, habrá {-s:dulce} para todos y un premio de {precio:100-3000} para
  el mejor grupo.
- El primer premio fue para {nombre:f}, vecina de {=ciudad}; el segundo, para {nombre:m}. Ambos recibieron {un:objeto}
  y un diploma.
not_t_tiempo:
- {un:x=borrasca++} causa daños en {=pueblo}
- {=pueblo} se recupera de {un:x=borrasca}
not_tiempo:
- {el:x} que azotó [ayer|anoche|esta madrugada] la comarca de {=pueblo} dejó {3-20f} carreteras cortadas y a
  {#200-4000} vecinos sin luz. No hubo que lamentar heridos graves.
- {un:x} sorprendió [anoche|ayer por la tarde] a los habitantes de {=pueblo}. En apenas {2-5f} horas se recogieron
  {#30-140} litros por metro cuadrado, una cantidad que no se registraba desde {=año_antes}.
not_tiempo_2:
- Los bomberos realizaron {#14-90} salidas, sobre todo por árboles caídos. Uno de ellos, {un:árbol} de {20-35m}
  metros, cayó sobre {un:z=coche} que estaba vací{o:z}.
- Las escuelas permanecerán cerradas hasta el {dia:x}. Se ha abierto [el polideportivo|la biblioteca|el salón de
  actos] para quienes no puedan volver a sus casas, y varios voluntarios {ayudan}.
ayudan:
- <@ayuda pres 5> y <@ayuda pres 5>
not_t_hallazgo:
- encuentran {un:x=reliquia++} en {un:z=edificio}
- {un:x=reliquia} de hace siglos aparece en {un:z=edificio} de {=pueblo}
not_hallazgo:
- Unos obreros que trabajaban en {un:z} de {=pueblo} han encontrado {un:x} de más de
  [doscientos|trescientos|cuatrocientos] años. Estaba dentro de {un:recipiente}, a {2-6m} metros de profundidad.
- {r} halló el {=dia} {un:x} cuando <@tierra imp r> cerca de {un:z}. «Al principio creí que era un juguete», explica.
  Los expertos de {=ciudad} {lo:x} estudiarán durante {3-9m} meses.
not_hallazgo_2:
- Junto a {el:x} había {lista:unos vasija 2} y restos de {un:tela}. Los arqueólogos creen que pertenecieron a una
  familia de comerciantes que vivió en la zona hacia {#1610-1790}.
- Si se confirma su antigüedad, {el:x} se expondrá en el museo de {=ciudad}, que recibe cada año {#4000-90000}
  visitantes. Mientras tanto, permanecerá guardad{o:x} en {un:edificio}.
not_declara:
- «[Estamos muy satisfechos|Es un día importante|Lo hemos conseguido entre todos|Era necesario]»,
  [declaró|afirmó|aseguró] {q} [ante la prensa|al terminar el acto|esta mañana]. <añadir pret q> que el ayuntamiento
  [mejoraría los accesos|cumpliría los plazos|informaría a los vecinos|estudiaría nuevas propuestas].
- {q} <prometer pret q> que se destinarán {precio:2000-90000} a este fin y <pedir pret q> a los vecinos que tengan
  paciencia.
- Preguntad{o:q} por los periodistas, {q} <responder pret q> que todavía es pronto para hacer balance, aunque
  <reconocer pret q> que «se podría haber hecho antes».
not_vecinos:
- Entre los vecinos hay opiniones distintas. {r} cree que {opina}. Otros, en cambio, preferirían que el dinero se
  gastara en {un:obra}.
- «{opina}», comenta {r} mientras <@calle pres r>. A su lado, una mujer asiente y añade que {opina}.
- {r} no <ocultar pres r> su {sentir_n}. «Llevo {5-50m} años en el pueblo y nunca había visto nada igual», dice.
not_declara_mal:
- «[Lo peor ha pasado|Podría haber sido mucho peor|Nadie se quedará sin ayuda|Los vecinos han dado ejemplo]»,
  [declaró|afirmó|aseguró] {q} [ante la prensa|al visitar la zona|esta mañana]. <añadir pret q> que el ayuntamiento
  [repararía los daños|limpiaría las calles|abriría una oficina de ayuda|pediría maquinaria a la provincia].
- {q} <prometer pret q> que se destinarán {precio:2000-90000} a reparar los daños y <pedir pret q> a los vecinos que
  no salgan de casa si no es necesario.
- Preguntad{o:q} por los periodistas, {q} <responder pret q> que los daños se conocerán dentro de unos días, y
  <agradecer pret q> el trabajo de los voluntarios.
not_vecinos_mal:
- «[Nos despertó el ruido|Salimos como pudimos|Pensé que se caía el tejado|Mis hijos estaban muertos de miedo]»,
  cuenta {r}. [A su puerta|En su calle|Delante de su casa] todavía hay [barro|ramas|tejas rotas|dos palmos de agua].
- {r} <perder perf r> [el coche|la cosecha|parte del tejado|todos los muebles], pero da las gracias a quienes {le:r}
  ayudaron. «Unos vecinos que <@ayuda imp 5> no me dejaron sol{o:r}», explica.
- «Llevo {5-50m} años en el pueblo y nunca había visto nada igual», dice {r}, que <@ayuda pret r> hasta la madrugada.
sentir_n:
- [alegría|sorpresa|preocupación|orgullo|emoción]
opina:
- esto dará vida al pueblo
- los jóvenes necesitan motivos para quedarse
- hacía falta desde hace tiempo
- todo llega si se sabe esperar
- lo importante es que nadie se quede atrás
- el año que viene será todavía mejor
- hay que contar más con los vecinos
not_cierre:
- El próximo pleno se celebrará el {dia:x} a {hora:6-8} de la tarde.
- Quienes deseen más información pueden llamar al ayuntamiento o acudir a la {calle:x}, número {#2-80}, de nueve a
  dos.
- {=pueblo} tiene {#300-9000} habitantes y está a {#8-90} kilómetros de {=ciudad}.
- La última vez que ocurrió algo parecido fue hace {7-40m} años.

biografía:
- {=nombre_completo}, {=oficio}¶{bio_1}¶{bio_2} {bio_3}¶{bio_4} {bio_5}¶{bio_6}
- Vida de {=nombre_completo}¶{bio_1} {bio_2}¶{bio_3}¶{bio_4}¶{bio_5} {bio_6}
bio_1:
- {=nombre_completo} <nacer> en {=pueblo} el {=nace}. <tener imp> {3-9m} hermanos. Su padre <@tierra imp 2> y su madre
  <@hogar imp 2>. En aquella casa, como escribió más tarde, «no sobraba nada, pero tampoco faltaba {un:legible}».
- El {=nace} <nacer> en {=pueblo} {=nombre_completo}, a quien la comarca recuerda como {una_figura}. De su infancia se
  sabe poco: que <leer|estudiar|dibujar imp> hasta muy tarde y que le gustaba <@tierra inf>.
una_figura:
- [una persona|una figura] [generosa|tenaz|discreta|adelantada a su tiempo]
bio_2:
- A los {=edad_aprende}, en {=año_aprende}, <entrar> como aprendiz en {=taller}, donde <aprender> a <@@trabajo inf> y
  a <@@trabajo inf>. Su maestro, {nombre:m}, decía que nunca había visto unas manos tan hábiles.
- En {=año_aprende}, cuando <tener imp> {=edad_aprende}, <empezar> a trabajar. Durante el día <@@trabajo imp>; por la
  noche <leer|estudiar|dibujar|escribir imp> a la luz de una vela.
bio_3:
- En {=año_viaja} <marcharse> a {=ciudad}. Allí <vivir> {=estancia}: {bio_hecho}, {bio_hecho} y <conocer> a
  {nombre:x}, con quien <mantener> una amistad que duró toda la vida.
- Con {=edad_viaja}, {p!} <dejar> su pueblo y <viajar> a {=ciudad}, donde <quedarse> {=estancia}. No fue una época
  fácil. «Comía poco y soñaba mucho», <contar imp> después.
bio_hecho:
- <trabajar> en [una imprenta|un hotel|el mercado|una fábrica]
- <asistir> a clases de {-:asignatura}
- <aprender> [inglés|francés|italiano|portugués]
- <dar> clases a los hijos de [un comerciante|un médico|una viuda|un diplomático]
- <pasar> [hambre y frío|muchas horas en la biblioteca]
- <escribir> {un:escrito+}
- <visitar> todos los museos
bio_4:
- Cuando <volver> a {=pueblo}, en {=año_vuelve}, ya <ser imp> {=oficio} de prestigio. <fundar> {un:grupo}, <organizar>
  {un:evento} y {frecuencia} <enseñar imp> su oficio a los jóvenes sin cobrarles nada.
- <regresar> en {=año_vuelve}, a los {=edad_vuelve}. Todo había cambiado: {el:edificio} estaba en ruinas y muchos
  vecinos se habían ido. {p!} <decidir> quedarse y <dedicar> el resto de su vida a {=materia}.
bio_5:
- En {=año_premio} <recibir> la medalla de la provincia. <tener imp> {=edad_premio} y, al recogerla, solo <decir>:
  «{sabiduría}».
- A los {=edad_premio}, en {=año_premio}, <publicar> {un:escrito++} donde <explicar imp> todo lo que <aprender plus>.
  Se vendieron {#300-9000} ejemplares.
bio_6:
- <morir> en {=pueblo} en {=año_muere}, a los {=edad_muere}. Una calle lleva hoy su nombre, y en {el:edificio} se
  conservan {lista:unos objeto 2} que le pertenecieron.
- {p!} <trabajar> hasta el último día. <morir> en {=año_muere}, con {=edad_muere}. Su último trabajo quedó sin
  terminar y todavía puede verse en {el:edificio}.

diario:
- {=entrada}¶{diario_1} {diario_2}¶{diario_3} {diario_4}
- {=entrada}¶{diario_1}¶{diario_2} {diario_3}¶{diario_4}
- {=entrada}¶{diario_3} {diario_2}¶{diario_1} {diario_4}
diario_1:
- Hoy me he levantado a {hora:6-9}. <@rutina perf 0> y <@rutina perf 0>. {ambiente_pres}.
- He dormido mal: anoche <@noche pret 0> y después no podía cerrar los ojos. Por la mañana <@calle perf 0> y <@calle
  perf 0> casi sin darme cuenta.
- Día de mucho trabajo. <@@trabajo perf 0>, <@@trabajo perf 0> y, cuando creía haber terminado, <tener perf 0> que
  <@@trabajo inf>.
- No pensaba escribir hoy, pero ha pasado algo. Mientras <@calle imp 0>, he visto a {nombre:x}, a quien no veía desde
  {la_escuela}.
la_escuela:
- la escuela
- hacía más de [diez|quince|veinte] años
- {=la_est} en que <@viaje pret 0>
diario_2:
- {q} ha venido a {hora:4-7}. <@mesa perf 3> y <@ocio perf 3>. Dice que mañana <@calle fut q>, aunque yo no lo creo.
- {q} me ha llamado para decirme que <@viaje fut q> en {=mes_próximo}. Me he alegrado, pero también he sentido
  {un:pesar++}. Ojalá yo también <@viaje subi 0> alguna vez.
- He discutido con {q} por una tontería: yo quería <@costumbre inf> y {él:q} prefería <@calle inf>. Al final no hemos
  hecho ni una cosa ni otra.
- Al volver <@hogar perf 0> y <@hogar perf 0>. Me gusta la casa cuando todo está en orden. {q} se ríe de mí.
diario_3:
- Sigo pensando en {un:idea+}. Si tuviera valor, <@viaje cond 0>; si tuviera dinero, <@estudio cond 0>. Como no tengo
  ni lo uno ni lo otro, <@costumbre pres 0>.
- He encontrado {un:objeto+} dentro de {un:cajón+}. Me ha recordado los veranos en {=pueblo}, cuando <@mar imp 3> y
  <@mar imp 3>.
- Por la tarde <@ocio perf 0>. {ambiente_pres}. He pensado que {sabiduría}; mañana, seguramente, pensaré lo contrario.
- {el:y=doméstico} de los vecinos se ha escapado y toda la calle ha salido a buscar{lo:y}. Yo <@buscar perf 0> y
  <@buscar perf 0>. Ha aparecido en {el:lugar}, tan tranquil{o:y}.
diario_4:
- Ahora <@noche fut 0> y mañana será otro día.
- Mañana tengo que <@calle inf>, <@calle inf> y no olvidarme de <@hogar inf>.
- Son {hora:10-12}. Hace un rato que {q} duerme. Apago la luz.
- Propósitos para {=mes_próximo}: <@estudio inf>, <@tierra inf> y no <@noche inf> tan a menudo.

receta_título:
- {=plato}
- {=plato} para {=raciones}
- receta de {=plato}
receta_inicio:
- En {=pueblo}, este plato se prepara desde siempre en {=est}, cuando {clima_presente}. No es difícil, pero necesita
  tiempo y [paciencia|buen humor|cariño].
- Esta receta me la enseñó mi [abuela|madre|tía|vecina], que la había aprendido en {=ciudad}. Ella decía que
  {sabiduría}, y en la cocina tenía razón.
- Si tienes invitados y no quieres complicarte, esta es tu receta. Se tarda menos de [una hora|hora y media|dos
  horas], y puede dejarse preparada la víspera.
- Cada familia la hace a su manera; la nuestra es así. La probamos por primera vez en {=ciudad}, en {=año_antes}, y
  desde entonces no falta en ninguna fiesta.
clima_presente:
- hace frío y apetece algo de cuchara
- el mercado está lleno de {-s:verdura}
- la familia se reúne los domingos
- los días se alargan
receta_final:
- Se puede servir con {un:bebida} o con un poco de pan. Si sobra, al día siguiente está todavía mejor.
- Conviene dejar reposar el plato [cinco|diez|quince|veinte] minutos antes de llevarlo a la mesa. A los niños les
  encanta.
- Quien no tenga tiempo puede preparar la mitad la noche anterior. Lo importante es que los ingredientes sean buenos.
  ¡Buen provecho!
- Hay quien le añade [canela|perejil|un poco de limón|una hoja de laurel|una pizca de pimienta]. Yo prefiero no
  hacerlo, pero sobre gustos no hay nada escrito.

cuentas_título:
- cuentas de todos los días
- problemas resueltos
- números que ayudan
- aprender a calcular
cuentas_inicio:
- Muchas veces hacemos cuentas sin darnos cuenta: al comprar, al viajar, al repartir. Estos ejemplos muestran cómo se
  resuelven paso a paso.
- Para resolver un problema conviene leerlo [dos veces|despacio], apuntar los datos y preguntarse qué se busca. Veamos
  algunos casos.
- La maestra {pila:f} propuso estos problemas a su clase de {=pueblo}. Debajo de cada uno está la solución que
  escribieron los alumnos.
cuentas_final:
- Antes de dar un resultado por bueno, conviene comprobarlo con la operación contraria.
- Si la respuesta parece demasiado grande o demasiado pequeña, lo mejor es revisar los datos.
- Con un poco de práctica, muchas de estas cuentas pueden hacerse de cabeza.
cuenta_compra:
- {p} va al mercado y compra {=kilos} kilos de {=fruta} y {=kilos2} kilos de {=verdura}. El kilo de {=fruta} cuesta
  {=precio} pesos, y el de {=verdura}, {=precio2}. ¿Cuánto paga? ¿Cuánto le devuelven si entrega un billete de
  {=pago}?¶Por lo primero paga {=n} × {=precio} = {=parte} pesos; por lo segundo, {=n2} × {=precio2} = {=parte2}. En
  total, {=parte} + {=parte2} = {=total} pesos. Como entrega {=pago}, le devuelven {=pago} − {=total} = {=vuelta}.
cuenta_compra_justa:
- {p} compra {=kilos} kilos de {=fruta} a {=precio} pesos el kilo y {=kilos2} de {=verdura} a {=precio2}. ¿Le basta
  con {=pago} pesos?¶Gasta {=n} × {=precio} = {=parte} en {=fruta} y {=n2} × {=precio2} = {=parte2} en {=verdura}. La
  suma es {=total}: le basta, y no le sobra nada.
cuenta_viaje:
- Un {=vehículo} sale de {=pueblo} a {=salida} de la mañana y circula a {=velocidad} kilómetros por hora. Si tarda
  {=horas} horas en llegar a {=otra}, ¿a qué distancia está? ¿A qué hora llega?¶En cada hora recorre {=velocidad}
  kilómetros; por tanto, en {=horas} horas recorre {=n} × {=velocidad} = {=distancia}. Como salió a {=salida}, llegará
  a {=llegada}.
- La distancia entre {=pueblo} y {=otra} es de {=distancia} kilómetros. Un {=vehículo} la recorre en {=horas} horas
  sin detenerse. ¿Cuál es su velocidad media?¶Se divide la distancia entre el tiempo: {=distancia} ÷ {=n} =
  {=velocidad}. La velocidad media es de {=velocidad} kilómetros por hora.
cuenta_reparto:
- {q} tiene {=total} y quiere repartir la fruta entre {=personas} amigos, a partes iguales. ¿Cuánto recibe cada uno?
  ¿Sobra algo?¶Se divide: {=m} ÷ {=n}. Como {=n} × {=c} = {=mult}, a cada amigo le tocan {=cada} y {=sobra}.
- En una caja hay {=total}. Si {r} llena con esa fruta {=personas} bolsas iguales, ¿cuántas piezas pone en cada
  una?¶La operación es {=m} ÷ {=n}. Cada bolsa lleva {=cada}, porque {=n} × {=c} = {=mult}; al final, {=sobra}.
cuenta_edades:
- {p} tiene {=mayor} años y {q} tiene {=menor}. ¿Qué edad tendrán dentro de {=años} años? ¿Cambiará la
  diferencia?¶{p!} tendrá {=mayor} + {=a} = {=mayor2} años, y {q!}, {=menor} + {=a} = {=menor2}. La diferencia seguirá
  siendo de {=dif} años, porque cada cual cumple uno al año.
- Entre {p} y {q} suman {=suma} años. {p!} es {=dif} años mayor. ¿Qué edad tienen?¶Si restamos la diferencia, {=suma}
  − {=d} = {=doble}, obtenemos el doble de la edad menor. Por tanto, {q!} tiene {=menor} años y {p!} tiene {=mayor}.
cuenta_rebaja:
- {un:x} costaba {=precio} euros y ahora tiene una rebaja del {=rebaja} %. ¿Cuánto se ahorra quien {lo:x} compra
  hoy?¶El {=rebaja} % de {=precio} es {=precio} × {=rebaja} ÷ 100 = {=ahorro} euros. {el:x} costará, por tanto,
  {=precio} − {=ahorro} = {=final} euros, es decir, {=palabra} euros.
cuenta_ahorro:
- {r} quiere comprar {un:x} y guarda {=mes} euros cada mes. ¿Cuánto habrá ahorrado al cabo de {=meses} meses? ¿Y si
  guardara el doble?¶En {=meses} meses reunirá {=n} × {=mes} = {=total} euros ({=palabra}). Si ahorrara {=doble} al
  mes, reuniría esa misma cantidad en la mitad de tiempo.
cuenta_huerto:
- Un huerto rectangular mide {=largo} metros de largo y {=ancho} de ancho. ¿Qué superficie tiene? ¿Cuántos metros de
  valla se necesitan para rodearlo?¶La superficie se obtiene multiplicando: {=largo} × {=ancho} = {=área} metros
  cuadrados. Para la valla hay que sumar los cuatro lados, o sea, 2 × ({=largo} + {=ancho}) = 2 × {=suma} = {=vuelta}
  metros.
cuenta_media:
- {q} <medir> la temperatura a mediodía durante tres días: {=a}, {=b} y {=c} grados. ¿Cuál fue la temperatura
  media?¶Se suman los tres valores, {=a} + {=b} + {=c} = {=suma}, y se divide entre tres: {=suma} ÷ 3 = {=media}. La
  media fue de {=media} grados.
- En tres exámenes de veinticinco preguntas o más, {r} <acertar> {=a}, {=b} y {=c}. ¿Cuántas acertó por término
  medio?¶La suma es {=suma}; dividida entre tres, da {=media}. Es como si hubiera acertado {=media} en cada examen.

lugar:
- {=pueblo}¶{lug_1} {lug_2}¶{lug_3} {lug_4}¶{lug_5} {lug_6}
- un paseo por {=pueblo}¶{lug_1}¶{lug_3} {lug_2}¶{lug_5} {lug_4}¶{lug_6}
- guía breve de {=pueblo}¶{lug_2} {lug_1}¶{lug_4}¶{lug_3} {lug_5}¶{lug_6}
lug_1:
- {=pueblo} está a {#12-90} kilómetros de {=ciudad}, al pie de {un:altura++}. Tiene {#200-9000} habitantes, {2-6f}
  iglesias y {un:edificio++} que se ve desde lejos.
- Quien llega a {=pueblo} por primera vez ve primero {un:edificio++} y, detrás, {un:paisaje+}. Las casas, blancas y
  bajas, se agrupan en torno a la plaza.
- Dicen que {=pueblo} fue fundado hacia {#1150-1650} por unos pastores. De aquella época quedan [una torre|una
  ermita|un puente|parte de la muralla] y {un:camino++}.
lug_2:
- Sus habitantes viven [de la tierra|del mar|del turismo|de la artesanía]: unos <@tierra pres 5>; otros <@tierra pres
  5>. {frecuencia} se celebra un mercado donde se venden {lista:-s fruta 2}, {-s:verdura} y {-s:vasija}.
- En {=est}, {presente_est}. Los jóvenes <@costumbre pres 5> y los mayores <@costumbre pres 5>. A {hora:9-11} de la
  noche ya no se oye nada.
- Es tierra de {lista:-s árbol 2}. En {=mes}, cuando {los:ave} cruzan el cielo, los vecinos <@tierra pres 5> y
  <@tierra pres 5>.
presente_est:
- el pueblo cambia por completo
- llegan visitantes de todas partes
- los días pasan despacio
lug_3:
- La calle principal empieza en {un:edificio++} y termina en {un:paisaje}. A la derecha hay {un:edificio+}; a la
  izquierda, {un:árbol+} bajo el que se sientan los ancianos.
- En la plaza hay una fuente con {2-8m} caños. Según la tradición, quien bebe de su agua [se casa antes de un año|no
  enferma nunca|vuelve siempre al pueblo].
- No deje de visitar {el:edificio} (entrada: {precio:2-15}; cerrado los lunes). En su interior se guardan {lista:unos
  objeto 2}, {un:mueble+} y un cuadro que representa {un:paisaje}.
lug_4:
- Desde allí sale {un:camino++} que cruza {un:extensión} y llega, después de [una hora|dos horas|hora y media], a
  {un:paisaje++}. Con suerte se ven {-s:ave} y hasta {un:silvestre}.
- La leyenda cuenta que en {el:paisaje} vivía {un:silvestre} que hablaba. Cuando alguien mentía, se oía {un:sonido}.
  Por eso, añaden los vecinos, en el pueblo se miente poco.
- El silencio es tan grande que se oye el vuelo de {un:insecto}. De noche, si no hay nubes, se ven más estrellas de
  las que nadie pueda contar.
lug_5:
- Para comer, lo mejor es la taberna de {pila:x}: sirven {un:plato+}, {un:plato} y, de postre, {-s:dulce}. El precio
  no suele pasar de {precio:10-30}.
- La fiesta mayor es el {3-28} de {=mes}. Ese día se reparten {-s:dulce}, hay {un:evento} y {un:grupo+} recorre las
  calles hasta el amanecer.
- Hay {2-5f} posadas y {un:vivienda+} que se alquila por semanas. Conviene reservar con tiempo, sobre todo si se viaja
  en {=mes}.
lug_6:
- Si va usted a {=pueblo}, no tenga prisa: pasee, pregunte, siéntese en un banco de la plaza. Es muy probable que
  alguien le cuente una historia.
- {p}, que nació allí y <@@trabajo pres> desde hace {11-50m} años, lo resume así: «Aquí {sabiduría}».
- Hay lugares que se visitan y lugares a los que se vuelve. {=pueblo} es de los segundos.

diálogo:
- en la tienda¶{p} entra en una tienda de {=ciudad}. Detrás del mostrador está {q}.¶—[Buenos días|Buenas tardes]. ¿Qué
  desea?¶—[Buenos días|Hola]. Quería {un:x=ropa}, si es posible {color}.¶{tienda_1}¶{tienda_2}¶{tienda_3}
- por teléfono¶{tel_1}¶{tel_2}¶{tel_3}¶{tel_4}
- en el consultorio¶{med_1}¶{med_2}¶{med_3}
- en la estación¶{est_1}¶{est_2}¶{est_3}
- en el restaurante¶{rest_1}¶{rest_2}¶{rest_3}
color:
- de color [azul|verde|gris|negro|marrón|claro]
- que no cueste demasiado
- que sirva para el [invierno|verano|trabajo]
tienda_1:
- —Mire, acaba de llegar {este:x} de [lana|algodón|lino]. También tenemos {lista:un ropa 2}.¶—[Me gusta
  más|Prefiero|Voy a mirar] el primer modelo. ¿De dónde viene?¶—De {=pueblo}. {lo:x} hacen a mano unas mujeres que
  <@hogar pres 5> por la mañana y cosen por la tarde.
- —¿Es para usted?¶—Sí. El mes que viene <ir pres 0> a {un:evento} y no tengo qué ponerme.¶—Entonces le enseño {el:x}
  más elegante de la casa. Toque, toque: es de [lana|algodón|lino].
tienda_2:
- —¿Puedo probárme{lo:x}?¶—Claro que sí. El probador está al fondo, a la [derecha|izquierda].¶Al cabo de un rato, {p}
  <salir pres>.¶—Me queda un poco [grande|estrech{o:x}|larg{o:x}|cort{o:x}]. ¿No {lo:x} tiene en otra talla?¶—Me
  parece que sí. Espere, que miro en el almacén.
- —¿Es [cómod{o:x}|resistente]?¶—Mucho. Mi hermano tiene {uno:x} igual y no se {lo:x} quita ni para dormir.¶{p}
  <reírse pres>.
tienda_3:
- —¿Cuánto cuesta?¶—{precio:15-160}. Si se lleva también {un:ropa}, le hago un descuento del {#5-25} %.¶—No, gracias;
  con {el:x} tengo bastante. ¿Puedo pagar con tarjeta?¶—Por supuesto. ¿Se {lo:x} envuelvo para regalo?¶—Sí, por favor:
  es para mi [hermana|padre|abuelo|mejor amiga], que cumple {edad:8-80}.
- —¿Qué precio tiene?¶—Costaba {precio:90-160}, pero está rebajad{o:x}: ahora son {precio:30-80}.¶—Me {lo:x} llevo. Y
  si no le gusta a mi marido, ¿puedo cambiar{lo:x}?¶—Tiene {10-30m} días, siempre que traiga el recibo.¶—Entonces,
  hasta luego, y muchas gracias.
tel_1:
- —¿Diga?¶—Hola, {=nq}. Soy {=np}. ¿Te llamo en mal momento?¶—No, no. Estaba <@hogar ger 0>. ¿Ha pasado algo?
- —¿Sí? ¿Quién es?¶—Soy yo, {=np}. ¿Por qué no contestabas?¶—Perdona, es que <@hogar imp 0> y no oía el teléfono.
  Cuéntame.
tel_2:
- —Te llamo porque el {dia:x} <@ocio fut 3> {r} y yo, y queremos que vengas.¶—¿El {dia:y}? Ese día no puedo: tengo que
  <@calle inf>.¶—¿Y no puedes dejarlo para otro momento?¶—Si alguien <@hogar subi 2> por mí, iría encantad{o:q}.
- —¿Has sabido algo de {r}? Hace semanas que no me escribe.¶—Sí, {lo:r} vi el {dia:x}. Me dijo que <@viaje plus 2> y
  que en {=mes_próximo} <@viaje cond 2>.¶—¡Qué suerte! A mí también me gustaría <@viaje inf>.¶—Pues díselo. Seguro que
  te invita.
- —Necesito un favor. ¿Podrías prestarme {un:x=herramienta}?¶—Claro. ¿Para qué {lo:x} quieres?¶—Tengo que arreglar
  {un:mueble+}.¶—Vale, pero devuélveme{lo:x} antes del {dia:x}, porque yo también pienso usar{lo:x}.
tel_3:
- —¿Y qué tal por ahí? ¿Hace buen tiempo?¶—{tiempo_hoy}. Ayer <@campo pret 0> y acabé
  [cansad{o:q}|agotad{o:q}|molid{o:q}].¶—Yo, en cambio, no he salido: <@ocio perf 0> y <@cocina perf 0>.
- —Por cierto, ¿te has enterado de lo de {el:lugar}?¶—No. ¿Qué ha pasado?¶—Dicen que van a cerrarlo. {r} está
  recogiendo firmas.¶—Pues que cuente con la mía.
tiempo_hoy:
- Regular: por la mañana llueve y por la tarde sale el sol
- Hace un frío terrible
- Mucho calor, pero por la noche refresca
- Un día precioso, la verdad
tel_4:
- —Bueno, te dejo, que están llamando a la puerta.¶—Hablamos el {dia:x}, entonces. Un beso.¶—Otro para ti. ¡Y no te
  olvides de {el_favor}!¶—Descuida.
- —Oye, tengo que colgar: se me quema {el:plato}.¶—Corre, corre. Mañana te llamo.¶—A partir de {hora:6-9}, por favor;
  antes no estaré.¶—De acuerdo. Adiós, {=nq}.
el_favor:
- lo que te he pedido
- <@calle inf>
med_1:
- —[Pase, por favor|Adelante]. Siéntese. ¿Qué le ocurre?¶—Me duele {el:x=herida} desde hace {3-9m} días, doctora. Al
  principio no le di importancia, pero anoche no pude dormir.¶—¿Se ha dado algún golpe? ¿Ha hecho algún
  esfuerzo?¶—Bueno… el {dia:x} <@campo pret 0>.
- —Buenos días. Usted es {=np}, ¿verdad? Cuénteme.¶—Estoy muy cansad{o:p}, doctor. Me acuesto a las diez y me levanto
  como si no hubiera dormido.¶—¿Come bien?¶—Lo normal: <@mesa pres 0>, <@mesa pres 0>…¶—¿Y hace ejercicio?¶—Poco.
  Antes <@tierra imp 0>, pero ahora no tengo tiempo.
med_2:
- —Vamos a ver. Respire hondo. Otra vez. ¿Le duele aquí?¶—Un poco. ¿Es grave?¶—No lo creo, pero es mejor que le
  hagamos un análisis. ¿Toma algún medicamento?¶—Ninguno. Solo {un:bebida} por las noches.
- —Tiene la tensión un poco alta. ¿Ha estado nervios{o:p} últimamente?¶—La verdad es que sí: en el trabajo quieren que
  <@@trabajo subj 0> y que además <@@trabajo subj 0>.¶—Entiendo. Eso no se cura con pastillas.
med_3:
- —Le voy a recetar este jarabe. Tome una cucharada cada [seis|ocho|doce] horas durante {5-10m} días. Y, sobre todo,
  descanse: no <@tierra subj 2> hasta que se le pase.¶—¿Puedo <@costumbre inf>?¶—Eso sí. Si no mejora, vuelva el
  {dia:x}.¶—Muchas gracias. Así lo haré.
- —Lo que necesita es cambiar de costumbres. Acuéstese antes, beba más agua y camine
  [veinte|veinticinco|treinta|treinta y cinco|cuarenta|cuarenta y cinco|cincuenta|cincuenta y cinco|sesenta] minutos
  cada día.¶—¿Nada más?¶—Nada más. Dentro de un mes me dirá cómo se encuentra. Pida cita a la salida, por favor.
est_1:
- —Perdone, ¿a qué hora sale el próximo tren para {=ciudad}?¶—A {hora:7-11}, pero lleva
  [quince|veinte|veinticinco|treinta|treinta y cinco|cuarenta|cuarenta y cinco|cincuenta] minutos de retraso.¶—¡Vaya!
  ¿Y no hay otro antes?¶—Me temo que no. Si tiene prisa, puede ir en autobús: salen cada [hora|dos horas|media hora]
  de la plaza.
- —Quisiera un billete para {=ciudad}, por favor.¶—¿De ida o de ida y vuelta?¶—De ida y vuelta. Salgo hoy y vuelvo el
  {dia:x}.¶—Son {precio:18-95}. ¿Lo quiere de ventanilla o de pasillo?¶—De ventanilla, si puede ser. Me gusta mirar
  {el:paisaje}.
est_2:
- En {un:asiento} de la sala, {q} <@mesa pres q>. Al ver a {p!}, sonríe.¶—¿También va a {=ciudad}? Yo voy a ver a mi
  [hija|nieto|hermana]. Hace dos años que no nos vemos.¶—Yo voy por trabajo: <ser pres 0> {=oficio}.¶—¡Qué casualidad!
  Mi padre también <@@trabajo imp 2>.
- {p} se sienta junto a {q!}, que <@costumbre pres q>. {ambiente_pres_est}.¶—¿Le importaría vigilarme la maleta un
  momento? —pregunta—. Tengo que hacer una llamada.¶—Vaya tranquil{o:p}. Yo no me muevo de aquí.
ambiente_pres_est:
- por el andén pasa {un:vehículo+}
- en un rincón duerme {un:mascota+}
- fuera se oye {un:sonido}
est_3:
- Por fin, el altavoz anuncia la llegada del tren. La gente se levanta, recoge sus bolsas y corre hacia el andén.¶—Ha
  sido un placer —dice {q!}—. Que tenga buen viaje.¶—Igualmente. Y salude a su familia de mi parte, aunque no me
  conozca.
- A {hora:11-12}, el tren entra en la estación. —¡Al fin! —exclama {p!}—. Creía que no llegaría nunca.¶—Lo importante
  es llegar —responde {q!}—. {sabiduría}.
rest_1:
- —Buenas noches. Tenemos una mesa reservada a nombre de {=np}.¶—Síganme, por favor. ¿Les parece bien junto a la
  ventana?¶—Perfecto. ¿Qué nos recomienda?¶—Hoy tenemos {un:plato+} y {un:plato}.
rest_2:
- —Para mí, {el:plato}. ¿Y tú, {=nq}?¶—Yo no tengo mucha hambre. Tomaré {un:plato} y {un:bebida}.¶—¿Y de beber?¶—Agua,
  por favor. Y un poco de pan.
rest_3:
- —¿Desean postre? La casa ofrece {-s:dulce} y {-s:fruta}.¶—Tráiganos {unos:dulce} para compartir y la cuenta, por
  favor.¶—Aquí tienen: son {precio:25-90}.¶—Quédese con la vuelta. Estaba todo riquísimo.
- —¿Todo bien?¶—Muy bien, gracias. Felicite a la cocinera de nuestra parte.¶—Se lo diré. ¿Les traigo {un:bebida}?¶—No,
  solo la cuenta: mañana tenemos que <@calle inf> muy temprano.

consejos:
- cómo cuidar {un:x=mascota} en casa¶{cons_in}¶{cons_animal} {cons_animal}¶{cons_animal}¶{cons_fin}
- [consejos para|cómo] tener {unos:x=flor} en el balcón¶{cons_in}¶{cons_planta} {cons_planta}¶{cons_planta}¶{cons_fin}
- [antes de salir de viaje|cómo preparar un viaje]¶{cons_in}¶{cons_viaje} {cons_viaje}¶{cons_viaje}¶{cons_fin}
- aprender a tocar {el:x=instrumento}¶{cons_in}¶{cons_música} {cons_música}¶{cons_música}¶{cons_fin}
- [dormir mejor|cómo descansar de verdad]¶{cons_in}¶{cons_sueño} {cons_sueño}¶{cons_sueño}¶{cons_fin}
- [cómo limpiar|para conservar] {un:x=mueble} antigu{o:x}¶{cons_in}¶{cons_mueble}
  {cons_mueble}¶{cons_mueble}¶{cons_fin}
cons_in:
- Mucha gente cree que esto es difícil, pero basta con un poco de [paciencia|orden|constancia]. Los consejos que
  siguen proceden de {p}, que <@@trabajo pres> desde hace {6-40m} años.
- No hay secretos: hay costumbres. Quien dedica a esta tarea [diez minutos|un cuarto de hora|media hora] todos los
  días acaba por hacerla bien, aunque [al principio le cueste|nadie le haya enseñado|tenga poco tiempo].
- En el número anterior, un lector de {=ciudad} nos preguntaba por este tema. Hemos consultado a {p}, {=oficio} de
  {=pueblo}, y esto es lo que nos ha dicho.
cons_fin:
- Por último, no se desanime si al principio no sale bien. Como dice {p!}, {sabiduría}.
- Si después de [un mes|dos meses|tres semanas] no nota ninguna mejora, pida ayuda a alguien con más experiencia.
- Y recuerde: es preferible hacer poco cada día que mucho de una sola vez.
cons_animal:
- Elija un rincón tranquilo y ponga allí {un:tela}. Un animal que descansa bien se asusta menos y obedece mejor.
- Nunca le falte agua limpia. Si hace calor, cámbiesela [dos|tres] veces al día; si hiela, compruebe que no se haya
  helado.
- No le dé {-s:dulce} ni sobras con sal. Es mejor que coma poco y a la misma hora: por ejemplo, a {hora:7-9} y a
  {hora:5-8}.
- Llévelo al veterinario al menos {dos_veces}. Si cojea, si no come o si se esconde, no espere a que se le pase.
- Háblele en voz baja y prémielo cuando haga algo bien. Los gritos no enseñan: solo dan miedo.
- Déjelo correr. {una_hora} al aire libre le hará más bien que cualquier juguete.
dos_veces:
- [una vez|dos veces] al año
una_hora:
- [una hora|media hora|un rato]
cons_planta:
- Riegue por la mañana temprano o cuando se haya puesto el sol, nunca a mediodía. El exceso de agua mata más plantas
  que la sed.
- Gire la maceta cada [semana|quince días] para que todas las hojas reciban la misma luz.
- Si ve {-s:insecto}, no se alarme: muchas veces ayudan a la planta. Si hay pulgón, lave las hojas con agua y jabón.
- En {=est}, corte las ramas secas y añada un poco de abono. Basta con {2-5f} cucharadas por maceta.
- No las ponga cerca de {un:aparato}: el aire caliente las seca. Les conviene más la ventana de {el:habitación}.
- Cuando las raíces asomen por debajo, cambie la planta a un recipiente más grande y use tierra nueva.
cons_viaje:
- Haga una lista dos días antes y tache lo que vaya guardando. En la maleta no deben faltar {un:ropa}, {un:calzado} de
  repuesto y {un:legible} para las esperas.
- Compruebe los horarios y llegue con [veinte|veinticinco|treinta|treinta y cinco|cuarenta|cuarenta y
  cinco|cincuenta|cincuenta y cinco|sesenta] minutos de antelación. Si pierde el tren, no pierda también la calma.
- Pregunte a los vecinos del lugar dónde comen ellos. Así conocerá {un:plato} que no aparece en las guías.
- Deje las llaves a alguien de confianza y pídale que <@hogar subj 2> mientras usted esté fuera.
- No lo lleve todo organizado: reserve una tarde para <@calle inf> sin rumbo.
- Lleve siempre {un:bebida} y algo de {-:fruta}. Un viajero con hambre se enfada por cualquier cosa.
cons_música:
- Empiece por canciones que ya conozca. El oído ayuda a los dedos más de lo que parece.
- Practique [quince|veinte|veinticinco|treinta|treinta y cinco|cuarenta|cuarenta y cinco] minutos diarios, mejor por
  la [mañana|tarde]. Es más útil que tocar cuatro horas los domingos.
- Afine {el:x} antes de tocar{lo:x} y guárde{lo:x} lejos de la humedad.
- Grábese de vez en cuando y escúchese con calma: descubrirá errores que no había notado.
- Busque con quién tocar. En {un:grupo+} se aprende a escuchar, que es lo más importante.
- Si los vecinos protestan, pacte con ellos un horario; quizá, con el tiempo, le pidan una canción.
cons_sueño:
- Acuéstese y levántese siempre a la misma hora, también los [domingos|sábados]. El cuerpo agradece la costumbre.
- Cene poco: {un:plato} y una pieza de fruta son suficientes. Espere al menos dos horas antes de irse a la cama.
- Apague {el:aparato} y lea unas páginas de {un:legible+}. La luz de las pantallas retrasa el sueño.
- Ventile el dormitorio [diez|quince|veinte] minutos cada día. Con la habitación fresca se duerme mejor.
- Si a los veinte minutos no se ha dormido, levántese, tome {un:bebida} y vuelva cuando tenga sueño.
- Apunte en un papel lo que le preocupa. Lo que está escrito deja de dar vueltas en la cabeza.
cons_mueble:
- Quítele el polvo con un paño seco; si está muy sucio, humedézcalo un poco, pero no use nunca lejía.
- Ponga {el:x} lejos de la ventana: el sol aclara la madera y acaba por abrirla.
- Para los arañazos pequeños funciona bien media nuez: se frota sobre la marca y se deja secar {2-8f} horas.
- Una vez al año, aplique una capa fina de cera con {un_trapo} y espere a que brille.
- Si cree que hay carcoma, llame a alguien que entienda. {consejo_extra}
consejo_extra:
- Un carpintero de confianza le dirá si tiene arreglo.
- Cuanto antes se trate, menos daño hará.
un_trapo:
- [un trapo de algodón|una brocha|una esponja suave]

opinión:
- ¿{op_tema}?¶{op_1}¶{op_2}¶{op_3}¶{op_4}
- sobre {el:x=idea} de {el_otro}¶{op_1} {op_2}¶{op_3}¶{op_4}
el_otro:
- [mi vecina|un amigo|mi abuelo|la alcaldesa]
op_tema:
- leer o mirar
- vivir en el campo o en la ciudad
- tenemos demasiada prisa
- para qué sirve {-:asignatura}
- se debe prohibir el coche en el centro
op_1:
- Hace unos días, mientras <@calle imp 0>, oí a dos personas que discutían. Una sostenía que antes se vivía mejor; la
  otra respondía que solo lo cree quien ha olvidado cómo era. Pensé que las dos tenían algo de razón.
- Se dice a menudo que ya no <@costumbre pres 3>. No estoy de acuerdo. Es cierto que tenemos menos tiempo; sin
  embargo, {opina_bien}.
- Cuando yo era niñ{o:p}, en mi casa <@costumbre imp 3> {frecuencia}. Hoy casi nadie lo hace. ¿Hemos ganado algo? ¿Qué
  hemos perdido?
opina_bien:
- nunca fue tan fácil <@estudio inf>
- nadie nos impide <@costumbre inf>
- basta con apagar {el:aparato} para descubrirlo
op_2:
- Por un lado, es evidente que {opina}. Por otro, no todo el mundo puede permitírselo: quien <@@trabajo pres 2>
  {8-12f} horas al día no tiene fuerzas para <@costumbre inf>.
- Se me dirá que exagero. Puede ser. Pero basta con <@calle inf> un {dia:x} cualquiera para comprobar que casi nadie
  levanta la vista. Si la levantáramos, veríamos {un:ave}, {un:árbol} o {un:edificio+}.
- Según una encuesta reciente, {#41-89} de cada cien personas querrían <@costumbre inf> más a menudo, pero solo
  {#5-39} lo hacen. La diferencia me parece muy significativa.
op_3:
- Además, hay que tener en cuenta el precio. Con {precio:900-9000} al mes, un ayuntamiento pequeño podría abrir [una
  biblioteca|un comedor|un taller de lectura|una piscina] o pagar a alguien para que <@ayuda subj 2>. ¿Por qué no se
  hace? Porque casi nunca lo pedimos.
- No propongo que volvamos atrás. Propongo, eso sí, que cada uno <@costumbre subj 2> al menos [una vez por semana|un
  rato cada día]. Si lo hiciéramos, <@ayuda cond 3> sin que nadie nos lo pidiera.
- Mi vecina, que tiene {edad:70-95}, lo explica mejor que yo: «De joven <@tierra imp 0> y <@hogar imp 0>; no éramos
  más felices, pero nos conocíamos todos».
op_4:
- En resumen, {sabiduría}. No es una idea nueva, pero conviene repetirla hasta que deje de hacer falta.
- Quizá me equivoque, y ojalá alguien me lo demuestre. Mientras tanto, seguiré <@costumbre ger 0>.
- Termino con una pregunta: cuando <tener subj 3> tiempo, ¿sabremos todavía qué hacer con él?

reseña:
- «{res_título}»¶{res_1} {res_2}¶{res_3}¶{res_4} {res_5}
- un libro: «{res_título}»¶{res_1}¶{res_2} {res_3}¶{res_5} {res_4}
res_título:
- {un:x=objeto++}
- {los:árbol} de {=ciudad}
- el invierno de {los:x=ave}
- nadie vive en {=pueblo}
- {el:paisaje} y {el:x=objeto}
res_1:
- La última novela de {nombre:x} cuenta la historia de {p!}, {=oficio} de {=pueblo}, a quien un día {le_llega}
  {un:objeto++}. Desde ese momento, nada volverá a ser como antes.
- Publicada en {#1920-1985} y olvidada durante décadas, esta obra de {nombre:x} vuelve ahora a las librerías. Su
  protagonista, {p!}, <@@trabajo pres>, <@noche pres> y sueña con {un:paisaje}.
le_llega:
- [le llega|le entregan|le regalan]
res_2:
- El argumento es sencillo: {p!} <@viaje pres>, conoce a {q} y, poco después, <@viaje pres>. Pero lo que importa no es
  lo que ocurre, sino cómo se cuenta.
- La acción transcurre en {=est}, entre {=ciudad} y un pueblo sin nombre. {q}, el personaje mejor dibujado, <@hogar
  pres q>, <@hogar pres q> y apenas habla; cuando lo hace, dice cosas como esta: «{sabiduría}».
res_3:
- La prosa es [limpia|sobria|rica|precisa] y los diálogos suenan a verdad. Hay páginas memorables, como aquella en que
  {p!} <@tierra pres> mientras {q} <@tierra pres q>, y los dos saben que no volverán a verse.
- Se le puede reprochar que el final llegue demasiado deprisa y que sobren personajes: ¿era necesario que apareciera
  {un:silvestre}? Tampoco convence el capítulo {ordinal_m}, en el que todos <@mesa pres 5> y nadie dice nada.
ordinal_m:
- [segundo|tercero|cuarto|quinto|sexto|séptimo|octavo|noveno|décimo]
res_4:
- Son {#120-680} páginas que se leen en {2-6f} tardes. El volumen cuesta {precio:12-29} y la edición, cuidada y sin
  erratas, merece un elogio.
- Recomendable para quien quiera pasar una tarde de {=est} con una buena historia; no tanto para quien busque acción.
res_5:
- No es una obra perfecta, pero es honesta, y eso se nota. Cuando se cierra el libro, uno querría <@viaje inf> o, al
  menos, <@costumbre inf>.
- Es posible que dentro de {10-50m} años se siga leyendo. Si no fuera así, sería una lástima.

entrevista:
- «{sabiduría}»¶{ent_0}¶{ent_1}¶{ent_2}¶{ent_3}¶{ent_4}
ent_0:
- {p!} {nombre_ap} nació en {=pueblo} hace {edad:34-88}. Es {=oficio} y nos recibe en {=taller}, entre
  {-s:herramienta} y {-s:legible}. {ambiente_pres_ent}.
- Nos citamos con {p!}, {=oficio}, en [un café|una cafetería|un parque] de {=ciudad}. Llega puntual, con {un:ropa+}, y
  pide {un:bebida}. {ambiente_pres_ent}.
nombre_ap:
- {apellido:x}
ambiente_pres_ent:
- fuera se oye {un:sonido+}
- {un:mascota+} nos mira desde {un:mueble}
- por la ventana entra olor a [pan|lluvia|jazmín|café]
ent_1:
- —¿Cómo empezó todo?¶—Por casualidad. De pequeñ{o:p} quería {ser_otro}. Un día <@@trabajo pret 0> para ayudar a mi
  [padre|madre|tía] y descubrí que me gustaba.
- —¿Siempre quiso ser {=oficio}?¶—No, qué va. Estudié {-:asignatura} durante {2-6m} años y no terminé. Luego [viajé
  por medio mundo|trabajé en un barco|vendí {-s:legible}|di clases de {-:asignatura}], volví y empecé desde abajo.
ser_otro:
- viajar por el mundo
- vivir en el mar
- tener un circo
- ser astronauta
ent_2:
- —¿Cómo es un día normal?¶—Me levanto a {hora:5-7}, <@rutina pres 0> y <@rutina pres 0>. Por la mañana <@@trabajo
  pres 0>; por la tarde <@@trabajo pres 0> y, si puedo, <@costumbre pres 0>.
- —¿Qué es lo más difícil de su trabajo?¶—La gente cree que lo difícil es <@@trabajo inf>, pero eso se aprende. Lo que
  cuesta es tener paciencia. Yo tardé {4-15m} años.
ent_3:
- —¿Se ha arrepentido alguna vez?¶—Muchas. Una noche de {=est} estuve a punto de dejarlo. Había perdido
  {precio:300-9000} y no sabía qué hacer. Si no hubiera sido por {pila:x}, que me animó, hoy <@costumbre cond 0>.
- —¿Qué le diría a un joven que quisiera empezar?¶—Que no tenga prisa. Que <@@trabajo subj 2>, que se equivoque y que
  vuelva a empezar. Y que <@costumbre subj 2> también: no todo es trabajar.
ent_4:
- —¿Qué planes tiene?¶—En {=mes_próximo} <@viaje fut 0>. Y, cuando vuelva, <@hogar fut 0>, que ya es hora.¶—Muchas
  gracias por su tiempo.¶—Gracias a ustedes. ¿Quieren {un:dulce}?
- —Una última pregunta: ¿es usted feliz?¶—(Ríe). Pregúntemelo dentro de diez años. De momento, <@mesa pres 0>,
  <@costumbre pres 0> y duermo bien. ¿Qué más se puede pedir?

pronóstico:
- el tiempo en la comarca de {=pueblo}¶{pron_1} {pron_2}¶{pron_3}¶{pron_4} {pron_5}
pron_1:
- Mañana, [lunes|martes|miércoles|jueves], el cielo estará [cubierto|nuboso|parcialmente nublado] en toda la comarca,
  con posibilidad de {-:fenómeno} a partir [del mediodía|de media tarde|del anochecer]. En {=ciudad} se alcanzarán los
  {pron_temp}.
- Durante la jornada de mañana continuará {el:fenómeno} de los últimos días, sobre todo en las zonas altas. Por la
  tarde se abrirán algunos claros.
pron_temp:
- {grados:x} grados
pron_2:
- El viento soplará del [norte|sur|este|oeste|noroeste|suroeste], con rachas de hasta {#25-90} kilómetros por hora.
  Quienes tengan previsto [salir al monte|pescar|subir a {un:altura}|navegar|trabajar en el campo] deberán tener
  cuidado.
- Por la noche refrescará, pero, a pesar de todo, será un buen día para <@tierra inf> o para <@costumbre inf>.
pron_3:
- El fin de semana {el_tiempo}. El sábado {será} y el domingo {será}. Las temperaturas [subirán|bajarán] entre {2-4} y
  {5-8m} grados.
el_tiempo:
- cambiará el tiempo
- seguirá la misma situación
- habrá de todo
será:
- amanecerá con niebla
- lucirá el sol
- lloverá de forma débil
- aumentarán las nubes
- llegará aire más frío
pron_4:
- Se recomienda a los conductores que circulen despacio por [la carretera|el puerto|la pista|las curvas] de {=pueblo},
  y a los agricultores, que [recojan {los:fruta}|protejan {los:verdura}|guarden [el ganado|las ovejas|las gallinas|las
  cabras]] antes del {dia:x}.
- Si el agua sigue cayendo, es posible que el río crezca. En ese caso, se avisará a los vecinos con la campana [de la
  iglesia|de la ermita|del ayuntamiento].
pron_5:
- No está previsto que la situación cambie antes del {dia:x}. Se informará de cualquier novedad por la radio.
- Tal día como hoy, en {=año_antes}, cayeron {#20-150} litros en {2-9f} horas; los más viejos todavía lo recuerdan.

aviso:
- aviso a los vecinos de la {calle:x}¶{av_1}¶{av_2} {av_3}¶{av_4}¶{=ciudad}, {=fecha}
av_1:
- Se comunica a todos los vecinos que el {=pronto}, de nueve a [doce|una|dos], se cortará el agua por obras en la
  [calle|avenida|plaza|red]. Se ruega que llenen los recipientes necesarios la noche anterior.
- La junta de vecinos, reunida el {=hace_poco} con {9-40m} asistentes, acordó por mayoría que se [repare el
  ascensor|arregle la cerradura|cambie la luz del portal|revise el tejado] y que se pinte [la escalera|el portal|la
  fachada|el patio].
- El próximo {dia:x} se celebrará en el patio {un:evento+}. Están invitados todos los vecinos, sus familias y hasta
  {los:doméstico}, siempre que se porten bien.
av_2:
- El coste, {precio:300-4000}, se repartirá entre {12-60f} viviendas. Quien no pueda pagarlo de una vez deberá hablar
  con {nombre:x}, del [primero|segundo|tercero|cuarto] izquierda.
- Se recuerda que está prohibido [lavar el coche en el patio|tender la ropa en la fachada|jugar a la pelota en el
  portal|dejar bicicletas en el pasillo] y que no se debe hacer ruido después de {hora:10-11} de la noche.
- Hace falta que alguien [friegue la escalera|riegue las plantas|cambie las bombillas|engrase el portón] y que otros
  [recojan el dinero|preparen la reunión|llamen a la empresa]. Los interesados pueden apuntarse en la lista del
  portal.
av_3:
- Si alguien encuentra {un:x=objeto+} en la escalera, se ruega que {lo:x} entregue en el bajo.
- Rogamos también que cierren {el:abrible} al salir, porque han entrado {-s:ave} dos veces esta semana.
- El ascensor no funcionará hasta el {dia:x}. Disculpen las molestias.
av_4:
- Gracias por su colaboración. La presidenta, {nombre:f}.
- Para cualquier duda, pregunten por {nombre:x} de [cuatro|cinco] a [siete|ocho]. Gracias a todos.

un_título:
- alguien de {=pueblo}
- gente de aquí
- una persona cualquiera
retrato:
- {un_título}¶{ret_1}¶{ret_2} {ret_3}¶{ret_4} {ret_5}
- retrato de {=np}¶{ret_1} {ret_2}¶{ret_4}¶{ret_3} {ret_5}
ret_1:
- {p} es {=oficio}. Tiene {edad:25-85}, {los_ojos} y {unas_manos}. Viste casi siempre {un:ropa+} y nunca sale sin
  {su:p} {-:objeto}.
- En {=pueblo} todo el mundo conoce a {p!}. Es [alt{o:p}|baj{o:p}|delgad{o:p}|fuerte|menud{o:p}], camina
  [deprisa|despacio|como si bailara] y saluda hasta a {los:doméstico}.
los_ojos:
- los ojos [claros|oscuros|verdes|muy vivos|cansados]
- la mirada [tranquila|curiosa|seria|alegre]
- el pelo [blanco|rizado|negro|corto|revuelto]
unas_manos:
- unas manos [grandes|finas|fuertes|hábiles]
- una voz [grave|suave|ronca|que se oye desde lejos]
- una risa contagiosa
ret_2:
- Por la mañana <@rutina pres>, <@rutina pres> y va a {=taller}, donde <@@trabajo pres> hasta que anochece. No le
  gusta <@hogar inf>; en cambio, <@costumbre cond> a todas horas.
- {frecuencia} <@costumbre pres>, y los domingos <@tierra pres> con {q}, que <@tierra pres q> mientras tanto. Cuando
  alguien le pregunta por qué, responde que {sabiduría}.
ret_3:
- De joven <@viaje> y <@viaje>. Ahora dice que ya no <viajar cond>, aunque guarda en {un:cajón+} {lista:un objeto 3}
  de entonces.
- Tiene dos defectos: habla demasiado y no soporta que nadie <@hogar subj 2> por {él:p}. También tiene una virtud:
  jamás ha faltado a {un_pal}.
un_pal:
- una promesa
- una cita
ret_4:
- Un día, hace ya tiempo, {q} le <pedir pret q> que <@ayuda subi p>. {p!} no lo <dudar>: <@ayuda>, <@ayuda> y no quiso
  que se lo agradecieran. Así es.
- Sus vecinos cuentan que, cuando <haber pret 2> {un:borrasca+}, {p} <@ayuda> y <@ayuda> durante toda la noche. Si se
  le pregunta, lo niega.
ret_5:
- Si alguna vez pasáis por {=pueblo}, preguntad por {p!}. Os invitará a {un:bebida} y, si tiene un buen día, os
  enseñará {su:p} {-:objeto}.
- No ha sido nunca famos{o:p} ni lo pretende. Pero el día que falte, la plaza parecerá más grande.

explicación:
- por qué [llueve|se forman las nubes]¶{ex_lluvia}¶{ex_lluvia_2} {ex_ejemplo}¶{ex_fin}
- cómo se hace el pan¶{ex_pan}¶{ex_pan_2} {ex_ejemplo}¶{ex_fin}
- el año y sus días¶{ex_año}¶{ex_año_2} {ex_ejemplo}¶{ex_fin}
- cómo funciona {una_bib}¶{ex_bib}¶{ex_bib_2} {ex_ejemplo}¶{ex_fin}
- medir y pesar¶{ex_medir}¶{ex_medir_2} {ex_ejemplo}¶{ex_fin}
- el camino de una carta¶{ex_correo}¶{ex_correo_2} {ex_ejemplo}¶{ex_fin}
una_bib:
- una biblioteca
ex_lluvia:
- El sol calienta el agua de los mares, de los ríos y de los lagos, y una parte se convierte en vapor. Ese vapor sube,
  se enfría y forma gotas tan pequeñas que flotan en el aire: son las nubes. Cuando las gotas se juntan y pesan
  demasiado, caen. Si hace mucho frío, en lugar de lluvia cae nieve.
- El agua que bebemos hoy ha dado muchas vueltas. Se evapora del mar, viaja en las nubes, cae sobre la montaña, baja
  por el río y vuelve al mar. Ninguna gota se pierde: solo cambia de sitio.
ex_lluvia_2:
- La cantidad de lluvia se mide en litros por metro cuadrado. Si en {=pueblo} caen {#5-60} litros, significa que sobre
  un cuadrado de un metro de lado se reunirían esos litros.
- En las laderas llueve más que en el llano, porque el aire, al subir, se enfría. Por eso {el:paisaje} de la montaña
  suele ser más verde.
ex_pan:
- Para hacer pan solo se necesitan harina, agua, sal y levadura. La levadura está viva: se alimenta de la harina y
  produce un gas que queda atrapado en la masa y la hincha. Por eso la miga tiene agujeros.
- Amasar es estirar y doblar la masa hasta que se vuelve elástica. Después hay que dejarla reposar, tapada con un
  paño, hasta que doble su tamaño. En verano tarda menos; en invierno, más.
ex_pan_2:
- En el horno, el calor detiene el trabajo de la levadura y dora la corteza. Una barra de {#200-400} gramos necesita
  unos [veinte|veinticinco|treinta] minutos; una hogaza grande, casi una hora.
- Por cada kilo de harina se emplean unos {#600-700} gramos de agua y {18-22m} gramos de sal. Con esas cantidades
  salen entre {3-4} y {5-7m} panes.
ex_año:
- Un año tiene trescientos sesenta y cinco días, repartidos en doce meses. Cada cuatro años, más o menos, se añade un
  día a febrero, y el año se llama bisiesto. Se hace así porque la Tierra tarda en dar la vuelta al Sol unas seis
  horas más de lo que dicen los calendarios.
- Un día tiene veinticuatro horas; una hora, sesenta minutos; un minuto, sesenta segundos. De modo que en un día hay
  mil cuatrocientos cuarenta minutos y ochenta y seis mil cuatrocientos segundos.
ex_año_2:
- Abril, junio, septiembre y noviembre tienen treinta días; febrero, veintiocho o veintinueve; los demás, treinta y
  uno. Muchas personas lo recuerdan contando con los nudillos de la mano.
- Las estaciones son cuatro: primavera, verano, otoño e invierno. Cuando en {=ciudad} es {=est}, al otro lado del
  mundo es {estación_opuesta@est}.
ex_bib:
- En una biblioteca hay miles de libros y, sin embargo, cualquiera puede encontrar el suyo en pocos minutos. El
  secreto está en el orden: cada libro lleva en el lomo un número que indica su tema y su lugar en el estante.
- Para llevarse {un:legible} hace falta un carné, que suele ser gratuito. Se puede tener en casa entre {7-10} y
  {15-30m} días y, si nadie más lo ha pedido, se puede renovar.
ex_bib_2:
- Quienes trabajan allí <@bibliotecario pres 5> y <@bibliotecario pres 5>. También reparan los libros rotos, con papel
  fino y mucha paciencia.
- La de {=pueblo} tiene {#2000-30000} libros y recibe cada mes a {#150-900} lectores. Los que más se prestan son los
  cuentos; los que menos, los de {-:asignatura}.
ex_medir:
- Antes se medía con el cuerpo: el pie, el palmo, el codo. El problema era que no todos los pies son iguales. Por eso
  se inventó el metro, que es el mismo en todas partes.
- Un kilómetro son mil metros y un metro, cien centímetros. Un kilo son mil gramos y una tonelada, mil kilos. Una vez
  que se sabe esto, casi todas las cuentas consisten en mover la coma.
ex_medir_2:
- Así, {medio_km}. Y quien pesa {gramos:45-95}.
- Para medir {un:habitación} basta una cinta: se mide el largo, se mide el ancho y se multiplican los dos números. El
  resultado se expresa en metros cuadrados.
medio_km:
- dos kilómetros y medio son dos mil quinientos metros
- tres cuartos de kilómetro son setecientos cincuenta metros
- un kilómetro y cuarto son mil doscientos cincuenta metros
- media tonelada son quinientos kilos
ex_correo:
- Cuando alguien echa una carta al buzón, empieza un viaje que pocos conocen. Un empleado la recoge, la lleva a una
  oficina y allí una máquina lee la dirección. Después la carta viaja de noche, en tren, en camión o en avión.
- El sello es el billete de la carta. Los primeros aparecieron en 1840; hasta entonces pagaba quien recibía el correo,
  y muchos preferían no recibir nada.
ex_correo_2:
- Entre {=ciudad} y {=pueblo} una carta tarda entre {entre_días} días. El cartero la deja en el buzón o, si hay que
  firmar, llama a la puerta. Si no hay nadie, vuelve al día siguiente.
- Un cartero de pueblo recorre {8-25m} kilómetros al día. Conoce a todos los vecinos y sabe quién espera noticias y
  quién las teme.
entre_días:
- dos y cinco
- tres y seis
ex_ejemplo:
- {p}, {=oficio} de {=pueblo}, lo explica así a los niños: «{sabiduría}». Y ellos, que no siempre lo entienden, toman
  nota.
- Lo comprobaron los alumnos de {=pueblo}: durante {2-6f} semanas tomaron notas, hicieron dibujos y al final
  prepararon {un:evento}.
- Mi abuelo, que <@tierra imp 2> y apenas fue a la escuela, lo sabía por experiencia. Yo lo he aprendido en los
  libros.
ex_fin:
- Como se ve, las cosas más corrientes esconden una explicación interesante. Solo hay que preguntar.
- La próxima vez que <@rutina subj 1>, acuérdate de esto y cuéntaselo a alguien.
- Quien quiera saber más puede consultar {un:legible+} o preguntar en la biblioteca.
- Y si alguien no lo cree, que haga la prueba.
estación_opuesta_primavera:
- otoño
estación_opuesta_verano:
- invierno
estación_opuesta_otoño:
- primavera
estación_opuesta_invierno:
- verano
"""

# Adjectives for the animals of the fables, and the animals.
CHARACTERS = """astuto, presumido, prudente, perezoso, trabajador, miedoso, viejo, sabio, orgulloso, generoso,
impaciente, curioso, envidioso, solitario, alegre, testarudo, distraído""".replace("\n", " ").split(", ")

FABLE_ANIMALS = """zorro, lobo, liebre:f, ardilla, erizo, tejón, ciervo, jabalí, nutria, lince:m, garduña, cabra
montés, gamo, comadreja, oso, conejo""".replace("\n", " ").split(", ")

# Recipes: name :: what it takes :: steps. Steps are written verb(object); "~" joins a pronoun to the verb; " // " parts
# two ways of saying the same.
DISHES = """
[guiso|estofado|potaje] de {-s:x=hervible} con {-s:y=pelable} ::
  {decena:300-900} g de {-s:x}; {decena:200-700} g de {-s:y}; 1 cebolla grande; {2-4m} dientes de ajo; [medio litro|un
  litro] de caldo; {2-5f} cucharadas de aceite de oliva; sal y [pimienta|pimentón|laurel] ::
  lavar(bien {los:x}) y cortar({lo:x})~ en trozos [pequeños|no muy grandes|regulares]; pelar({los:y}) y
  cortar({lo:y})~ en [dados|rodajas|tiras]; picar(la cebolla) y los ajos // picar(los ajos) y la cebolla;
  calentar(el aceite) en una cazuela y dorar(la cebolla) durante [cinco|diez] minutos; añadir({los:y}) y remover(la
  mezcla) con una cuchara de madera; cubrir(todo) con el caldo y cocer(el guiso) a fuego [lento|medio] durante
  [veinte|veinticinco|treinta|treinta y cinco|cuarenta|cuarenta y cinco] minutos; incorporar({los:x}), probar(el
  caldo) y corregir(el punto) de sal; dejar(el guiso) reposar antes de servir // apagar(el fuego) y
  esperar([cinco|diez] minutos) antes de servir
[bizcocho|tarta|pastel] de {-s:x=cortable} ::
  {decena:200-350} g de harina; {decena:120-220} g de azúcar; {3-5m} huevos; 1 vaso de [leche|yogur natural|zumo de
  naranja]; {decena:80-150} g de mantequilla; 1 sobre de levadura; [dos|tres] {-s:x} en trozos ::
  encender(el horno) a [170|180|190] grados y engrasar(un molde); batir(los huevos) con el azúcar hasta que doblen su
  tamaño; fundir(la mantequilla) a fuego lento y añadir(la)~ poco a poco; mezclar(la harina) con la levadura,
  pasar(la)~ por un colador e incorporar(la)~ a los huevos; pelar({los:x}), cortar({lo:x})~ en trozos y
  repartir({lo:x})~ por la masa; verter(la masa) en el molde y hornear(la)~ durante [treinta|treinta y
  cinco|cuarenta|cuarenta y cinco|cincuenta] minutos; comprobar(el centro) con un palillo: si sale seco, está listo;
  sacar(el molde) del horno y dejar(el dulce) enfriar [quince|veinte|veinticinco|treinta|treinta y cinco|cuarenta]
  minutos
ensalada de {-s:x=cortable} y {-s:y=fruto} ::
  [dos|tres|cuatro] {-s:x}; un puñado de {-s:y}; 1 lechuga; {decena:80-200} g de queso [fresco|de cabra|curado];
  {3-5f} cucharadas de aceite; 1 cucharada de [vinagre|zumo de limón]; sal ::
  lavar(la lechuga), secar(la)~ y partir(la)~ con las manos; pelar({los:x}) y cortar({lo:x})~ en [láminas finas|dados
  pequeños|rodajas]; picar({los:y}) y tostar({lo:y})~ en una sartén sin aceite; cortar(el queso) en dados
  [pequeños|grandes]; mezclar(el aceite) con el [vinagre|zumo de limón] y la sal // batir(el aceite) con la sal en
  un vaso; colocar(la lechuga) en una fuente y repartir({los:x}) por encima; añadir(el queso), aliñar(la ensalada) y
  mezclar(la)~ con cuidado
crema de {-s:x=pelable} ::
  {decena:500-900} g de {-s:x}; 1 puerro; 1 patata; {decena:600-900} ml de agua o caldo; un chorro de nata; aceite,
  sal y [nuez moscada|pimienta] ::
  pelar({los:x}) y trocear({lo:x})~; limpiar(el puerro), cortar(lo)~ en rodajas y pelar(la patata); calentar(un poco
  de aceite) en una olla y rehogar(el puerro) {5-8m} minutos; añadir({los:x}), la patata y el agua, y subir(el
  fuego) hasta que hierva; bajar(el fuego), tapar(la olla) y esperar([veinte|veinticinco|treinta] minutos);
  triturar(todo) hasta que quede una crema fina // triturar(la mezcla) y colar(la)~ si hace falta; añadir(la nata),
  remover(la crema) y servir(la)~ con [pan tostado|unas gotas de aceite|un poco de perejil]
arroz con {-s:x=frito} ::
  {decena:200-450} g de arroz; {decena:300-500} g de {-s:x}; 1 pimiento rojo; {2-3m} tomates maduros; un poco de
  azafrán; el doble de caldo que de arroz; aceite y sal ::
  cortar({los:x}) en trozos y salar({lo:x})~ ligeramente; rallar(los tomates) y picar(el pimiento); calentar(el
  aceite) en una paella o en una sartén ancha y dorar({los:x}) durante {6-10m} minutos; añadir(el pimiento) y,
  [tres|cuatro|cinco] minutos después, los tomates; echar(el arroz), remover(lo)~ y agregar(el azafrán); verter(el
  caldo) muy caliente y cocer(el arroz) {15-18m} minutos sin moverlo; apagar(el fuego), tapar(el arroz) con un paño
  y dejar(lo)~ reposar {3-6m} minutos
"""
